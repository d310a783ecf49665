//! The declarations against the headers that come with the library, by the C compiler.

use super::*;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::ptr;

/// The headers beside the library of `DSV4_UCX_LIB`; the wheel has them, Debian's package does not.
fn headers() -> Option<PathBuf> {
    let library = PathBuf::from(config::library()?);
    let folder = library.parent()?.parent()?.join("include");
    folder.join("ucp/api/ucp.h").exists().then_some(folder)
}

/// The compiler's words; none if it has nothing to say.
fn compile(source: &str, include: &std::path::Path) -> String {
    let mut compiler = Command::new("cc")
        .args(["-x", "c", "-std=c11", "-fsyntax-only", "-I"])
        .arg(include)
        .arg("-")
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    compiler.stdin.take().unwrap().write_all(source.as_bytes()).unwrap();
    let output = compiler.wait_with_output().unwrap();
    assert_eq!(output.status.success(), output.stderr.is_empty());
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn the_declarations_are_those_of_the_headers() {
    let Some(include) = headers() else {
        assert!(std::env::var_os("CI").is_none(), "CI has the headers beside DSV4_UCX_LIB");
        println!("left out: no UCX headers beside DSV4_UCX_LIB");
        return;
    };
    let mut source = String::from("#include <stddef.h>\n#include <ucp/api/ucp.h>\n");
    for (expression, value) in struct_facts().into_iter().chain(constant_facts()) {
        source.push_str(&format!("_Static_assert({expression} == {value}, \"{expression}\");\n"));
    }
    source.push_str("_Static_assert(sizeof(ucs_status_t) == 1 && UCS_ERR_LAST == -100, \"\");\n");
    // A prototype that differs from the header's is an error.
    for prototype in PROTOTYPES {
        source.push_str(prototype);
        source.push_str(";\n");
    }
    source.push_str(
        "static void done(void *r, ucs_status_t s, void *u) { (void)r; (void)s; (void)u; }\n\
         static void broken(void *a, ucp_ep_h e, ucs_status_t s) { (void)a; (void)e; (void)s; }\n\
         ucp_send_nbx_callback_t d = done;\nucp_err_handler_cb_t b = broken;\n",
    );
    assert_eq!(compile(&source, &include), "");
    source.push_str("_Static_assert(sizeof(ucp_params_t) == 7, \"the check can fail\");\n");
    assert!(compile(&source, &include).contains("the check can fail"));
}

#[test]
fn a_status_pointer_has_three_meanings() {
    let pointer = |value: isize| Begun::from_pointer(ptr::without_provenance_mut(value as usize));
    assert_eq!(pointer(0), Begun::Done);
    assert_eq!(pointer(-1), Begun::Failed(Status(-1)));
    assert_eq!(pointer(-100), Begun::Failed(Status(-100)));
    assert!(matches!(pointer(-101), Begun::Request(_)));
    assert!(matches!(pointer(64), Begun::Request(_)));
}
