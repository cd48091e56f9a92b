//! What a training loop tells its caller after every step, and what the caller answers. Prints nothing.

/// Whether to go on after a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Control {
    /// Go on.
    Continue,
    /// Save and return [`crate::TrainError::Interrupted`].
    Stop,
}
