//! The state tables against the committed ones: no transition changes unnoticed.

use pd_transfer::states::dump;

// PD-F8
#[test]
fn tables_are_as_committed() {
    let now = dump();
    if std::env::var_os("UPDATE_SNAPSHOTS").is_some() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/it/states.txt");
        std::fs::write(path, &now).unwrap();
    }
    let committed = include_str!("states.txt");
    for (line, (a, b)) in now.lines().zip(committed.lines()).enumerate() {
        assert_eq!(a, b, "line {}", line + 1);
    }
    assert_eq!(now.lines().count(), committed.lines().count());
}
