//! Where the targets put the bytes under test: readers take paths. Not a target itself.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// A folder of this process, in memory where the system has such a place: a file on a disk would be most of the time of an
/// execution.
pub fn folder() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let memory = Path::new("/dev/shm");
        let root = if memory.is_dir() { memory.to_path_buf() } else { std::env::temp_dir() };
        let folder = root.join(format!("dsq-fuzz-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder for the file under test");
        folder
    })
}

/// Writes a file into [`folder`], over the one of the last execution.
pub fn file(name: &str, bytes: &[u8]) -> PathBuf {
    let path = folder().join(name);
    std::fs::write(&path, bytes).expect("room for the file under test");
    path
}
