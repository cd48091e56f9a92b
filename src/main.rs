//! The `dsq` command. Not a library.
fn main() {}
