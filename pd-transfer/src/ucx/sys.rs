//! What we use of UCX's C interface: types and constants as in the headers of UCX 1.22, functions
//! looked up in the library when it is opened.
//!
//! Structs have their full C size, and a field mask says which fields we set; that is how UCX lets
//! one program run with older and newer libraries. Status codes are plain numbers, since a newer
//! library may return ones that are not listed here. The test compares everything with the headers.
#![expect(unsafe_code, reason = "looks up foreign functions by name")]

use super::{UcxError, config};
use libloading::Library;
use std::ffi::{CStr, c_char, c_void};
use std::fmt;
use std::sync::OnceLock;

/// `ucs_status_t`: 0 is good, 1 is "under way", a negative number an error.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub(super) struct Status(pub(super) i8);

impl fmt::Debug for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// What [`Status`] values are below zero and above this are also error pointers.
const STATUS_LAST: isize = -100;

/// `ucs_status_ptr_t`: nothing (done), an error, or a request that is under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Begun {
    Done,
    Failed(Status),
    Request(*mut c_void),
}

impl Begun {
    pub(super) fn from_pointer(pointer: *mut c_void) -> Self {
        let value = pointer.addr().cast_signed();
        if pointer.is_null() {
            Self::Done
        } else if (STATUS_LAST..0).contains(&value) {
            Self::Failed(Status(i8::try_from(value).unwrap_or(i8::MIN)))
        } else {
            Self::Request(pointer)
        }
    }
}

/// A C expression with the value that it must have.
#[cfg(test)]
type Fact = (String, u64);

/// A parameter of UCX.
pub(super) trait CStruct: Sized {
    /// All fields zero: numbers, null pointers and no callbacks.
    const NONE: Self;
}

macro_rules! c_structs {
    ($($name:ident = $c:literal, $bytes:literal bytes {
        $($field:ident: $type:ty = $c_field:literal @ $at:literal,)+
    })+) => {
        $(
            #[doc = concat!("`", $c, "`")]
            #[derive(Clone, Copy, Debug)]
            #[repr(C)]
            pub(super) struct $name {
                $(pub(super) $field: $type,)+
            }

            impl CStruct for $name {
                // SAFETY: the fields of all these structs are integers, raw pointers, optional
                // functions and structs and arrays of such, for which zero is a value.
                const NONE: Self = unsafe { std::mem::zeroed() };
            }

            const _: () = assert!(size_of::<$name>() == $bytes);
            $(const _: () = assert!(std::mem::offset_of!($name, $field) == $at);)+
        )+

        #[cfg(test)]
        fn struct_facts() -> Vec<Fact> {
            vec![$(
                (format!("sizeof({})", $c), $bytes),
                $((format!("offsetof({}, {})", $c, $c_field), $at),)+
            )+]
        }
    };
}

macro_rules! c_constants {
    ($($name:ident: $type:ty = $value:literal, $c:literal;)+) => {
        $(
            #[doc = concat!("`", $c, "`")]
            pub(super) const $name: $type = $value;
        )+

        #[cfg(test)]
        fn constant_facts() -> Vec<Fact> {
            vec![$(($c.to_owned(), $value),)+]
        }
    };
}

macro_rules! c_functions {
    ($($name:ident($($type:ty),*) $(-> $result:ty)?, $c:literal;)+) => {
        /// The functions of an opened library, each with its C prototype. It is never closed:
        /// UCX leaves threads and exit handlers behind.
        pub(super) struct Api {
            $(
                #[doc = concat!("`", $c, "`")]
                pub(super) $name: unsafe extern "C" fn($($type),*) $(-> $result)?,
            )+
            version: Version,
            _library: Library,
        }

        impl Api {
            fn from_library(library: Library, path: &str) -> Result<Self, UcxError> {
                // SAFETY: the types are those of the C prototypes beside them, which the test
                // compares with UCX's headers. The pointers stay valid because the library is kept
                // in the same struct and that struct only lives in a static.
                let api = unsafe {
                    Self {
                        $($name: *library.get(concat!(stringify!($name), "\0").as_bytes())
                            .map_err(|_| UcxError::Function {
                                path: path.into(),
                                function: stringify!($name),
                            })?,)+
                        version: Version { major: 0, minor: 0, release: 0 },
                        _library: library,
                    }
                };
                Ok(api.with_version())
            }
        }

        #[cfg(test)]
        const PROTOTYPES: &[&str] = &[$($c),+];
    };
}

macro_rules! opaque {
    ($($name:ident = $c:literal),+) => {
        $(
            #[doc = concat!("What a `", $c, "` points to.")]
            #[derive(Debug)]
            #[repr(C)]
            pub(super) struct $name {
                _opaque: [u8; 0],
            }
        )+
    };
}

opaque!(
    Context = "ucp_context_h",
    Worker = "ucp_worker_h",
    Ep = "ucp_ep_h",
    Mem = "ucp_mem_h",
    Rkey = "ucp_rkey_h",
    Address = "ucp_address_t *"
);

/// `ucp_send_nbx_callback_t`
pub(super) type SendCallback = extern "C" fn(*mut c_void, Status, *mut c_void);
/// `ucp_err_handler_cb_t`
pub(super) type ErrorCallback = extern "C" fn(*mut c_void, *mut Ep, Status);

c_structs! {
    Params = "ucp_params_t", 88 bytes {
        field_mask: u64 = "field_mask" @ 0,
        features: u64 = "features" @ 8,
        request_bytes: usize = "request_size" @ 16,
        request_init: *const c_void = "request_init" @ 24,
        request_cleanup: *const c_void = "request_cleanup" @ 32,
        tag_sender_mask: u64 = "tag_sender_mask" @ 40,
        mt_workers_shared: i32 = "mt_workers_shared" @ 48,
        estimated_num_eps: usize = "estimated_num_eps" @ 56,
        estimated_num_ppn: usize = "estimated_num_ppn" @ 64,
        name: *const c_char = "name" @ 72,
        node_local_id: usize = "node_local_id" @ 80,
    }
    WorkerParams = "ucp_worker_params_t", 200 bytes {
        field_mask: u64 = "field_mask" @ 0,
        thread_mode: u32 = "thread_mode" @ 8,
        cpu_mask: [u64; 16] = "cpu_mask" @ 16,
        events: u32 = "events" @ 144,
        user_data: *mut c_void = "user_data" @ 152,
        event_fd: i32 = "event_fd" @ 160,
        flags: u64 = "flags" @ 168,
        name: *const c_char = "name" @ 176,
        am_alignment: usize = "am_alignment" @ 184,
        client_id: u64 = "client_id" @ 192,
    }
    MemMapParams = "ucp_mem_map_params_t", 48 bytes {
        field_mask: u64 = "field_mask" @ 0,
        address: *mut c_void = "address" @ 8,
        bytes: usize = "length" @ 16,
        flags: u32 = "flags" @ 24,
        prot: u32 = "prot" @ 28,
        memory_type: u32 = "memory_type" @ 32,
        exported: *const c_void = "exported_memh_buffer" @ 40,
    }
    ErrorHandler = "ucp_err_handler_t", 16 bytes {
        callback: Option<ErrorCallback> = "cb" @ 0,
        argument: *mut c_void = "arg" @ 8,
    }
    SockAddr = "ucs_sock_addr_t", 16 bytes {
        address: *const c_void = "addr" @ 0,
        bytes: u32 = "addrlen" @ 8,
    }
    EpParams = "ucp_ep_params_t", 104 bytes {
        field_mask: u64 = "field_mask" @ 0,
        address: *const Address = "address" @ 8,
        err_mode: u32 = "err_mode" @ 16,
        err_handler: ErrorHandler = "err_handler" @ 24,
        user_data: *mut c_void = "user_data" @ 40,
        flags: u32 = "flags" @ 48,
        sockaddr: SockAddr = "sockaddr" @ 56,
        conn_request: *mut c_void = "conn_request" @ 72,
        name: *const c_char = "name" @ 80,
        local_sockaddr: SockAddr = "local_sockaddr" @ 88,
    }
    RequestParam = "ucp_request_param_t", 96 bytes {
        op_attr_mask: u32 = "op_attr_mask" @ 0,
        flags: u32 = "flags" @ 4,
        request: *mut c_void = "request" @ 8,
        callback: Option<SendCallback> = "cb" @ 16,
        datatype: u64 = "datatype" @ 24,
        user_data: *mut c_void = "user_data" @ 32,
        reply_buffer: *mut c_void = "reply_buffer" @ 40,
        memory_type: u32 = "memory_type" @ 48,
        recv_info: *mut c_void = "recv_info" @ 56,
        memh: *mut Mem = "memh" @ 64,
        remote_datatype: u64 = "remote_datatype" @ 72,
        remote: *const c_void = "remote" @ 80,
        remote_count: usize = "remote_count" @ 88,
    }
}

/// The version of the interface that is asked for: the oldest that has all we use.
pub(super) const API: (u32, u32) = (1, 13);

c_constants! {
    PARAM_FEATURES: u64 = 0x1, "UCP_PARAM_FIELD_FEATURES";
    FEATURE_RMA: u64 = 0x2, "UCP_FEATURE_RMA";
    FEATURE_WAKEUP: u64 = 0x10, "UCP_FEATURE_WAKEUP";
    WORKER_THREAD_MODE: u64 = 0x1, "UCP_WORKER_PARAM_FIELD_THREAD_MODE";
    THREAD_MODE_SINGLE: u32 = 0, "UCS_THREAD_MODE_SINGLE";
    MAP_ADDRESS: u64 = 0x1, "UCP_MEM_MAP_PARAM_FIELD_ADDRESS";
    MAP_LENGTH: u64 = 0x2, "UCP_MEM_MAP_PARAM_FIELD_LENGTH";
    MAP_PROT: u64 = 0x8, "UCP_MEM_MAP_PARAM_FIELD_PROT";
    MAP_MEMORY_TYPE: u64 = 0x10, "UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE";
    PROT_LOCAL_READ: u32 = 0x1, "UCP_MEM_MAP_PROT_LOCAL_READ";
    PROT_LOCAL_WRITE: u32 = 0x2, "UCP_MEM_MAP_PROT_LOCAL_WRITE";
    PROT_REMOTE_READ: u32 = 0x100, "UCP_MEM_MAP_PROT_REMOTE_READ";
    MEMORY_TYPE_HOST: u32 = 0, "UCS_MEMORY_TYPE_HOST";
    EP_REMOTE_ADDRESS: u64 = 0x1, "UCP_EP_PARAM_FIELD_REMOTE_ADDRESS";
    EP_ERR_MODE: u64 = 0x2, "UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE";
    EP_ERR_HANDLER: u64 = 0x4, "UCP_EP_PARAM_FIELD_ERR_HANDLER";
    ERR_MODE_PEER: u32 = 1, "UCP_ERR_HANDLING_MODE_PEER";
    OP_CALLBACK: u32 = 0x2, "UCP_OP_ATTR_FIELD_CALLBACK";
    OP_USER_DATA: u32 = 0x4, "UCP_OP_ATTR_FIELD_USER_DATA";
    OP_FLAGS: u32 = 0x10, "UCP_OP_ATTR_FIELD_FLAGS";
    OP_MEMH: u32 = 0x100, "UCP_OP_ATTR_FIELD_MEMH";
    CLOSE_FORCE: u32 = 0x1, "UCP_EP_CLOSE_FLAG_FORCE";
}

c_functions! {
    ucp_get_version(*mut u32, *mut u32, *mut u32),
        "void ucp_get_version(unsigned *, unsigned *, unsigned *)";
    ucs_status_string(Status) -> *const c_char,
        "const char *ucs_status_string(ucs_status_t)";
    ucp_init_version(u32, u32, *const Params, *const c_void, *mut *mut Context) -> Status,
        "ucs_status_t ucp_init_version(unsigned, unsigned, const ucp_params_t *, const ucp_config_t *, ucp_context_h *)";
    ucp_cleanup(*mut Context),
        "void ucp_cleanup(ucp_context_h)";
    ucp_worker_create(*mut Context, *const WorkerParams, *mut *mut Worker) -> Status,
        "ucs_status_t ucp_worker_create(ucp_context_h, const ucp_worker_params_t *, ucp_worker_h *)";
    ucp_worker_destroy(*mut Worker),
        "void ucp_worker_destroy(ucp_worker_h)";
    ucp_worker_get_address(*mut Worker, *mut *mut Address, *mut usize) -> Status,
        "ucs_status_t ucp_worker_get_address(ucp_worker_h, ucp_address_t **, size_t *)";
    ucp_worker_release_address(*mut Worker, *mut Address),
        "void ucp_worker_release_address(ucp_worker_h, ucp_address_t *)";
    ucp_worker_get_efd(*mut Worker, *mut i32) -> Status,
        "ucs_status_t ucp_worker_get_efd(ucp_worker_h, int *)";
    ucp_worker_arm(*mut Worker) -> Status,
        "ucs_status_t ucp_worker_arm(ucp_worker_h)";
    ucp_worker_progress(*mut Worker) -> u32,
        "unsigned ucp_worker_progress(ucp_worker_h)";
    ucp_mem_map(*mut Context, *const MemMapParams, *mut *mut Mem) -> Status,
        "ucs_status_t ucp_mem_map(ucp_context_h, const ucp_mem_map_params_t *, ucp_mem_h *)";
    ucp_mem_unmap(*mut Context, *mut Mem) -> Status,
        "ucs_status_t ucp_mem_unmap(ucp_context_h, ucp_mem_h)";
    ucp_rkey_pack(*mut Context, *mut Mem, *mut *mut c_void, *mut usize) -> Status,
        "ucs_status_t ucp_rkey_pack(ucp_context_h, ucp_mem_h, void **, size_t *)";
    ucp_rkey_buffer_release(*mut c_void),
        "void ucp_rkey_buffer_release(void *)";
    ucp_ep_create(*mut Worker, *const EpParams, *mut *mut Ep) -> Status,
        "ucs_status_t ucp_ep_create(ucp_worker_h, const ucp_ep_params_t *, ucp_ep_h *)";
    ucp_ep_close_nbx(*mut Ep, *const RequestParam) -> *mut c_void,
        "ucs_status_ptr_t ucp_ep_close_nbx(ucp_ep_h, const ucp_request_param_t *)";
    ucp_ep_rkey_unpack(*mut Ep, *const c_void, *mut *mut Rkey) -> Status,
        "ucs_status_t ucp_ep_rkey_unpack(ucp_ep_h, const void *, ucp_rkey_h *)";
    ucp_rkey_destroy(*mut Rkey),
        "void ucp_rkey_destroy(ucp_rkey_h)";
    ucp_get_nbx(*mut Ep, *mut c_void, usize, u64, *mut Rkey, *const RequestParam) -> *mut c_void,
        "ucs_status_ptr_t ucp_get_nbx(ucp_ep_h, void *, size_t, uint64_t, ucp_rkey_h, const ucp_request_param_t *)";
    ucp_request_free(*mut c_void),
        "void ucp_request_free(void *)";
}

impl fmt::Debug for Api {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Api").field("version", &self.version).finish_non_exhaustive()
    }
}

/// Version of a UCX library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Version {
    /// First number.
    pub major: u32,
    /// Second number; libraries that differ in it do not understand each other.
    pub minor: u32,
    /// Third number.
    pub release: u32,
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.release)
    }
}

impl Api {
    /// The library of this process, opened by the first call that finds it.
    pub(super) fn open() -> Result<&'static Self, UcxError> {
        static API: OnceLock<Api> = OnceLock::new();
        if let Some(api) = API.get() {
            return Ok(api);
        }
        let (path, is_given) = match config::library() {
            Some(path) => (path, true),
            None => (config::DEFAULT_LIBRARY.into(), false),
        };
        let shown = path.to_string_lossy().into_owned();
        // SAFETY: a library runs code when it is opened; this one is chosen by whoever runs the
        // process, as every library of the loader is.
        let library = unsafe { Library::new(&path) }.map_err(|error| UcxError::NotFound {
            looked_for: match is_given {
                true => format!("{shown} ({})", config::VARIABLE),
                false => shown.clone(),
            },
            reason: error.to_string(),
        })?;
        let api = Self::from_library(library, &shown)?;
        // Another thread may have been faster; it has opened the same library.
        Ok(API.get_or_init(|| api))
    }

    fn with_version(mut self) -> Self {
        let Version { major, minor, release } = &mut self.version;
        // SAFETY: the function writes the three numbers and nothing else.
        unsafe { (self.ucp_get_version)(major, minor, release) };
        self
    }

    pub(super) fn version(&self) -> Version {
        self.version
    }

    /// UCX's words for a status.
    pub(super) fn describe(&self, status: Status) -> String {
        // SAFETY: the function takes any number and returns a string that is either static or,
        // for a number that it does not know, in a static buffer; both end with a zero byte.
        let text = unsafe {
            let text = (self.ucs_status_string)(status);
            if text.is_null() { c"?" } else { CStr::from_ptr(text) }
        };
        format!("{} ({})", text.to_string_lossy(), status.0)
    }

    /// The error of a call, if there is one.
    pub(super) fn check(&self, function: &'static str, status: Status) -> Result<(), UcxError> {
        match status {
            Status(0) => Ok(()),
            other => Err(UcxError::Call { function, text: self.describe(other) }),
        }
    }
}

#[cfg(test)]
#[path = "sys_tests.rs"]
mod tests;
