//! Names of parameters: the path of a module here, and the name of its tensor in a file of Hugging Face. No tensors.

use dsq_checkpoint::LlamaConfig;

/// The Hugging Face name of the tensor at a module path (`layers.0.mlp.up_proj.weight`), of all types but mixtral.
pub fn tensor_name(path: &str) -> String {
    if path.starts_with("lm_head.") { path.to_owned() } else { format!("model.{path}") }
}

/// What mixtral's files call the parts of a feed-forward block, beside their names here.
const MIXTRAL: [[&str; 2]; 4] =
    [["mlp", "block_sparse_moe"], ["gate_proj", "w1"], ["up_proj", "w3"], ["down_proj", "w2"]];

/// [`tensor_name`] in a model of any type.
pub(crate) fn stored_name(path: &str, config: &LlamaConfig) -> String {
    let name = tensor_name(path);
    if config.model_type != "mixtral" {
        return name;
    }
    renamed(&name, |part| MIXTRAL.iter().find(|[here, _]| *here == part).map(|[_, stored]| *stored))
}

/// The path of a parameter or module within the modules here, from its name in a file: another one for mixtral's experts only.
pub fn parameter_path(name: &str) -> String {
    renamed(name, |part| MIXTRAL.iter().find(|[_, stored]| *stored == part).map(|[here, _]| *here))
}

fn renamed(name: &str, other: impl Fn(&str) -> Option<&'static str>) -> String {
    name.split('.').map(|part| other(part).unwrap_or(part)).collect::<Vec<_>>().join(".")
}

/// Follows the path of a visitor into a module; the kinds of an enum are no part of a path.
pub fn enter(path: &mut Vec<String>, name: &str, container: &str) {
    if !container.starts_with("Enum:") {
        path.push(name.to_owned());
    }
}

/// [`enter`], out of it again.
pub fn leave(path: &mut Vec<String>, container: &str) {
    if !container.starts_with("Enum:") {
        path.pop();
    }
}
