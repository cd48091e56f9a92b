//! AdamW over the parameters of a Burn module, with its state by parameter path, so that a checkpoint can hold it and a
//! resumed run goes on with the same bits. The update is `dsq_kernels::train::adamw` (PyTorch's formula); Burn's own
//! optimizer makes a dozen passes over memory and keeps its state under random parameter ids.

use crate::StateTensor;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{Gradients, Tensor, TensorData};
use dsq_kernels::train as kernel;
use dsq_model::{enter, leave};
use std::collections::BTreeMap;

/// Gradients by parameter path (`layers.0.mlp.up_proj.weight`).
#[derive(Debug, Clone, PartialEq, Default)]
pub struct NamedGradients(BTreeMap<String, Vec<f32>>);

impl NamedGradients {
    /// Takes the gradients of `model`'s parameters out of a backward pass. Parameters without one are left out.
    pub fn take<M: Module>(model: &M, mut grads: Gradients) -> Self {
        struct Take<'a> {
            path: Vec<String>,
            grads: &'a mut Gradients,
            out: BTreeMap<String, Vec<f32>>,
        }
        impl ModuleVisitor for Take<'_> {
            fn enter_module(&mut self, name: &str, container: &str) {
                enter(&mut self.path, name, container);
            }
            fn exit_module(&mut self, _name: &str, container: &str) {
                leave(&mut self.path, container);
            }
            fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
                if let Some(grad) = param.val().grad_remove(self.grads) {
                    self.out.insert(self.path.join("."), host(grad));
                }
            }
        }
        let mut take = Take { path: Vec::new(), grads: &mut grads, out: BTreeMap::new() };
        model.visit(&mut take);
        Self(take.out)
    }

    /// Adds the gradients of another micro-batch.
    pub fn add(&mut self, other: Self) {
        for (path, grad) in other.0 {
            match self.0.entry(path) {
                std::collections::btree_map::Entry::Vacant(e) => {
                    e.insert(grad);
                }
                std::collections::btree_map::Entry::Occupied(mut e) => {
                    for (a, b) in e.get_mut().iter_mut().zip(grad) {
                        *a += b;
                    }
                }
            }
        }
    }

    /// The norm over all of them, in f64.
    pub fn norm(&self) -> f64 {
        self.0.values().map(|g| kernel::sum_of_squares(g)).sum::<f64>().sqrt()
    }

    /// The gradient of one parameter.
    pub fn get(&self, path: &str) -> Option<&[f32]> {
        self.0.get(path).map(Vec::as_slice)
    }
}

/// What a parameter gets of an update.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ParamGroup {
    /// Factor of the learning rate.
    pub rate: f64,
    /// Weight decay.
    pub decay: f64,
}

/// AdamW and its moments.
#[derive(Debug, Clone, PartialEq)]
pub struct AdamW {
    beta1: f64,
    beta2: f64,
    eps: f64,
    t: u64,
    moments: BTreeMap<String, Moments>,
}

#[derive(Debug, Clone, PartialEq)]
struct Moments {
    shape: Vec<usize>,
    m: Vec<f32>,
    v: Vec<f32>,
}

impl AdamW {
    /// Without history. PyTorch's defaults are betas 0.9 and 0.999, eps 1e-8.
    pub fn new(beta1: f64, beta2: f64, eps: f64) -> Self {
        Self { beta1, beta2, eps, t: 0, moments: BTreeMap::new() }
    }

    /// Updates made so far.
    pub fn updates(&self) -> u64 {
        self.t
    }

    /// One update. Gradients are first scaled to a norm of at most `clip` (PyTorch's `clip_grad_norm_`: the norm gets
    /// 1e-6 added); `norm` is [`NamedGradients::norm`], which the caller has checked to be finite. `group` gives the
    /// settings of a parameter by its path, rank and values.
    pub fn step<M: Module>(
        &mut self,
        model: M,
        grads: &NamedGradients,
        lr: f64,
        norm: f64,
        clip: f64,
        group: impl Fn(&str, usize, &[f32]) -> ParamGroup,
    ) -> M {
        struct Update<'a, F> {
            path: Vec<String>,
            grads: &'a NamedGradients,
            moments: &'a mut BTreeMap<String, Moments>,
            settings: kernel::AdamW,
            group: F,
        }
        impl<F: Fn(&str, usize, &[f32]) -> ParamGroup> ModuleMapper for Update<'_, F> {
            fn enter_module(&mut self, name: &str, container: &str) {
                enter(&mut self.path, name, container);
            }
            fn exit_module(&mut self, _name: &str, container: &str) {
                leave(&mut self.path, container);
            }
            fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
                let path = self.path.join(".");
                let Some(grad) = self.grads.get(&path) else { return param };
                let (id, tensor, mapper) = param.consume();
                let (shape, tensor) = (tensor.dims(), tensor.inner());
                let device = tensor.device();
                let mut w = host(tensor);
                let group = (self.group)(&path, D, &w);
                update(self.moments, &path, &shape, self.settings, group, &mut w, grad);
                let tensor = Tensor::from_data(TensorData::new(w, shape), &device).autodiff().require_grad();
                Param::from_mapped_value(id, tensor, mapper)
            }
        }
        let grad_scale = if norm > clip { (clip / (norm + 1e-6)) as f32 } else { 1.0 };
        let settings = self.begin(lr, grad_scale);
        model.map(&mut Update { path: Vec::new(), grads, moments: &mut self.moments, settings, group })
    }

    /// One update of plain vectors: path, values, gradient (already clipped), and settings of each.
    pub(crate) fn step_values(&mut self, params: Vec<(String, &mut Vec<f32>, Vec<f32>, ParamGroup)>, lr: f64) {
        let settings = self.begin(lr, 1.0);
        for (path, w, grad, group) in params {
            let shape = [w.len()];
            update(&mut self.moments, &path, &shape, settings, group, w, &grad);
        }
    }

    /// Counts an update and gives its settings.
    fn begin(&mut self, lr: f64, grad_scale: f32) -> kernel::AdamW {
        self.t += 1;
        let (beta1, beta2, eps) = (self.beta1, self.beta2, self.eps);
        kernel::AdamW { lr, beta1, beta2, eps, decay: 0.0, t: self.t, grad_scale }
    }

    /// The moments as tensors named `{prefix}m.{path}` and `{prefix}v.{path}`. Save [`AdamW::updates`] beside them.
    pub fn state(&self, prefix: &str) -> Vec<StateTensor> {
        let tensor = |kind: &str, path: &str, shape: &[usize], data: &[f32]| StateTensor {
            name: format!("{prefix}{kind}.{path}"),
            shape: shape.to_vec(),
            data: data.to_vec(),
        };
        self.moments
            .iter()
            .flat_map(|(path, x)| [tensor("m", path, &x.shape, &x.m), tensor("v", path, &x.shape, &x.v)])
            .collect()
    }

    /// Takes up a saved state: tensors as [`AdamW::state`] named them (others are ignored).
    pub fn restore(&mut self, prefix: &str, tensors: &[StateTensor], updates: u64) {
        self.t = updates;
        self.moments.clear();
        for t in tensors {
            let Some((kind, path)) = t.name.strip_prefix(prefix).and_then(|n| n.split_once('.')) else { continue };
            let moments = self.moments.entry(path.to_owned()).or_insert_with(|| Moments {
                shape: t.shape.clone(),
                m: Vec::new(),
                v: Vec::new(),
            });
            match kind {
                "m" => moments.m.clone_from(&t.data),
                _ => moments.v.clone_from(&t.data),
            }
        }
    }
}

/// The update of one parameter.
fn update(
    moments: &mut BTreeMap<String, Moments>,
    path: &str,
    shape: &[usize],
    settings: kernel::AdamW,
    group: ParamGroup,
    w: &mut [f32],
    grad: &[f32],
) {
    let zeros = || vec![0.0; w.len()];
    let new = |_: &String| Moments { shape: shape.to_vec(), m: zeros(), v: zeros() };
    let moments = moments.entry(path.to_owned()).or_insert_with_key(new);
    let settings = kernel::AdamW { lr: settings.lr * group.rate, decay: group.decay, ..settings };
    kernel::adamw(&settings, w, grad, &mut moments.m, &mut moments.v);
}

fn host<const D: usize>(t: Tensor<D>) -> Vec<f32> {
    t.into_data().try_into_vec::<f32>().expect("models are f32")
}
