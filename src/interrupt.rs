//! Ctrl-C and SIGTERM. The first one asks the running job to finish its step and save; a second one ends the process at
//! once. Not for commands that save nothing: they leave the signals alone and end by them.

use crate::error::CliError;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, OnceLock};

/// The signal that asked to stop; 0 before one came.
static SIGNAL: LazyLock<Arc<AtomicUsize>> = LazyLock::new(Arc::default);

/// Listens from now on; the flag is raised by the first signal.
///
/// # Errors
/// Exit code 70 when the system refuses the handlers.
pub fn stop_flag() -> Result<Arc<AtomicBool>, CliError> {
    static FLAG: OnceLock<Arc<AtomicBool>> = OnceLock::new();
    if let Some(flag) = FLAG.get() {
        return Ok(flag.clone());
    }
    let raised = FLAG.get_or_init(Arc::default);
    for signal in [SIGINT, SIGTERM] {
        // In this order: the first signal finds the flag down, so only a second one ends the process.
        flag::register_conditional_shutdown(signal, 128 + signal, raised.clone())
            .and_then(|_| flag::register_usize(signal, SIGNAL.clone(), signal as usize))
            .and_then(|_| flag::register(signal, raised.clone()))
            .map_err(|e| CliError::new(70, format!("cannot listen for signal {signal}: {e}")))?;
    }
    Ok(raised.clone())
}

/// The exit code of an interrupted job: 128 and the number of the signal, 130 after Ctrl-C and 143 after SIGTERM.
pub fn exit_code() -> u8 {
    match SIGNAL.load(Ordering::SeqCst) as i32 {
        SIGTERM => 143,
        _ => 130,
    }
}
