//! What a journal has of a finished block: codes, scales, changed norms, grids of inputs, the fit; and the reader that gives the quantized
//! layers one by one, for the output. Not the folder and its order (see `journal.rs`).

use super::sealed::{self, Sealed, damaged, floats};
use crate::TrainError;
use crate::ptq::{BlockFit, Fit, PtqLinear, PtqNorm, PtqOutcome, Rescale};
use dsq_checkpoint::{NamedTensor, TensorData};
use dsq_quant::{FloatType, InputGrid, QParams, QuantArgs, QuantizedMatrix, pack_rows, packed_words, unpack_i32};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// What is not a tensor of a block. Floats are kept as their bits: JSON has no word for those that are not finite.
#[derive(Debug, Default, Serialize, Deserialize)]
struct About {
    linears: Vec<LinearAbout>,
    norms: Vec<(String, FloatType)>,
    inputs: Vec<InputAbout>,
    fits: Vec<(usize, u64, u64, bool)>,
    latents: Vec<String>,
    never_hit: Vec<String>,
}

/// Module, scheme, and the bits of the scale with the zero point.
type InputAbout = (String, QuantArgs, Option<(u32, i32)>);

#[derive(Debug, Clone, Serialize, Deserialize)]
struct LinearAbout {
    module: String,
    args: QuantArgs,
    size: [usize; 2],
    fit: Option<FitBits>,
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct FitBits {
    error: u64,
    rtn_error: u64,
    dead_columns: usize,
    plain_rows: usize,
    damping: Option<u64>,
}

impl From<Fit> for FitBits {
    fn from(f: Fit) -> Self {
        let (dead_columns, plain_rows, damping) = (f.dead_columns, f.plain_rows, f.damping.map(f64::to_bits));
        Self { error: f.error.to_bits(), rtn_error: f.rtn_error.to_bits(), dead_columns, plain_rows, damping }
    }
}

impl From<FitBits> for Fit {
    fn from(f: FitBits) -> Self {
        let (dead_columns, plain_rows, damping) = (f.dead_columns, f.plain_rows, f.damping.map(f64::from_bits));
        let (error, rtn_error) = (f64::from_bits(f.error), f64::from_bits(f.rtn_error));
        Self { error, rtn_error, dead_columns, plain_rows, damping }
    }
}

fn bytes(name: String, codes: &[i8]) -> NamedTensor {
    NamedTensor { name, data: TensorData::I8 { shape: vec![codes.len()], data: codes.to_vec() } }
}

fn row(name: String, data: &[f32]) -> NamedTensor {
    floats(name, vec![data.len()], data.to_vec())
}

/// The tensors of linear `i` of a block. Integer codes lie in words, as a folder has them.
fn pack(i: usize, l: &PtqLinear) -> Vec<NamedTensor> {
    let (m, name) = (&l.matrix, |part: &str| format!("{i}.{part}"));
    let codes = match m.args.qtype.float() {
        Some(_) => bytes(name("codes"), &m.codes),
        None => {
            let data = pack_rows(&m.codes, m.k, m.args.qtype.bits());
            NamedTensor { name: name("codes"), data: TensorData::I32 { shape: vec![data.len()], data } }
        }
    };
    let mut out = vec![codes, row(name("scales"), &m.scales), bytes(name("zeros"), &m.zeros)];
    out.push(row(name("global"), m.global_scale.as_slice()));
    if let Some(r) = &l.rescale {
        out.extend([row(name("rows"), &r.rows), row(name("columns"), &r.columns)]);
    }
    out
}

fn unpack(file: &Sealed, i: usize, about: LinearAbout) -> Result<PtqLinear, TrainError> {
    let name = |part: &str| format!("{i}.{part}");
    let LinearAbout { module, args, size: [n, k], fit } = about;
    let stored = file.read(&name("codes"))?;
    let codes = match args.qtype.float() {
        Some(_) => stored.into_iter().map(|b| b as i8).collect(),
        None => {
            let words: Vec<i32> = stored.as_chunks::<4>().0.iter().map(|&b| i32::from_le_bytes(b)).collect();
            let bits = args.qtype.bits();
            words.chunks(packed_words(k, bits).max(1)).flat_map(|row| unpack_i32(row, bits, k)).collect()
        }
    };
    let zeros = file.read(&name("zeros"))?.into_iter().map(|b| b as i8).collect();
    let (scales, global) = (file.read_f32(&name("scales"))?, file.read_f32(&name("global"))?);
    let matrix = QuantizedMatrix { args, n, k, codes, scales, zeros, global_scale: global.first().copied() };
    matrix.validate().map_err(|source| TrainError::Quant { module: module.clone(), source })?;
    let rescale = match file.shape(&name("rows")) {
        None => None,
        Some(_) => Some(Rescale { rows: file.read_f32(&name("rows"))?, columns: file.read_f32(&name("columns"))? }),
    };
    Ok(PtqLinear { module, matrix, fit: fit.map(Fit::from), rescale })
}

/// Latent weights by module.
pub(super) type Latents = Vec<(String, Vec<f32>)>;

/// Writes down what `made` has of the tensors that `of_block` names; the fit is that of `layer`. For `fingerprint` see `sealed.rs`.
pub(super) fn write(
    path: &Path,
    fingerprint: &Value,
    layer: usize,
    of_block: impl Fn(&str) -> bool,
    made: &PtqOutcome,
    latents: &Latents,
) -> Result<(), TrainError> {
    let mut about = About::default();
    let mut tensors = Vec::new();
    for l in made.linears.iter().filter(|l| of_block(&l.module)) {
        tensors.extend(pack(about.linears.len(), l));
        let (module, args, size) = (l.module.clone(), l.matrix.args, [l.matrix.n, l.matrix.k]);
        about.linears.push(LinearAbout { module, args, size, fit: l.fit.map(FitBits::from) });
    }
    for norm in made.norms.iter().filter(|n| of_block(&n.name)) {
        tensors.push(row(format!("norm.{}", about.norms.len()), &norm.values));
        about.norms.push((norm.name.clone(), norm.dtype));
    }
    for (module, grid) in made.inputs.iter().filter(|(m, _)| of_block(m)) {
        let params = grid.params.map(|p| (p.scale.to_bits(), p.zero));
        about.inputs.push((module.clone(), grid.args, params));
    }
    let fits = made.blocks.iter().filter(|b| b.layer == layer);
    about.fits.extend(fits.map(|b| (b.layer, b.before.to_bits(), b.after.to_bits(), b.kept)));
    about.never_hit.extend(made.never_hit.iter().filter(|m| of_block(m)).cloned());
    for (module, latent) in latents.iter().filter(|(m, _)| of_block(m)) {
        tensors.push(row(format!("latent.{}", about.latents.len()), latent));
        about.latents.push(module.clone());
    }
    sealed::write(path, fingerprint, tensors, &about)
}

/// Takes up what a finished block became, but for its quantized layers; every byte of the file is compared with its checksum.
pub(super) fn restore(path: &Path, fingerprint: &Value, into: &mut PtqOutcome) -> Result<(), TrainError> {
    let file = Sealed::open(path, fingerprint)?;
    file.verify()?;
    let about: About = file.about()?;
    for (i, (name, dtype)) in about.norms.into_iter().enumerate() {
        into.norms.push(PtqNorm { name, values: file.read_f32(&format!("norm.{i}"))?, dtype });
    }
    let params = |p: (u32, i32)| QParams { scale: f32::from_bits(p.0), zero: p.1 };
    into.inputs.extend(about.inputs.into_iter().map(|(m, args, p)| (m, InputGrid { args, params: p.map(params) })));
    let fit = |(layer, before, after, kept)| BlockFit {
        layer,
        before: f64::from_bits(before),
        after: f64::from_bits(after),
        kept,
    };
    into.blocks.extend(about.fits.into_iter().map(fit));
    into.never_hit.extend(about.never_hit);
    Ok(())
}

/// The quantized layers of a journal, in the order of the model; each is read when it is asked for.
#[derive(Debug)]
pub struct Blocks {
    /// Of the run that the files must be of.
    fingerprint: Value,
    linears: Vec<Place>,
    /// Their numbers by module.
    at: HashMap<String, usize>,
    /// Module, file and number of latent weights.
    latents: Vec<(String, PathBuf, usize)>,
}

/// Where a layer lies.
#[derive(Debug)]
struct Place {
    path: PathBuf,
    index: usize,
    about: LinearAbout,
}

impl Blocks {
    pub(super) fn new(fingerprint: Value) -> Self {
        Self { fingerprint, linears: Vec::new(), at: HashMap::new(), latents: Vec::new() }
    }

    /// Takes in the layers of a file: of a block new ones, of the steps after the blocks (`again`) in the place of those that are
    /// there under their names.
    pub(super) fn add(&mut self, path: &Path, again: bool) -> Result<(), TrainError> {
        let about: About = Sealed::open(path, &self.fingerprint)?.about()?;
        for (index, about) in about.linears.into_iter().enumerate() {
            let place = Place { path: path.into(), index, about };
            match self.find(&place.about.module) {
                Some(at) if again => self.linears[at] = place,
                Some(at) => {
                    let first = self.linears[at].path.display();
                    let problem = format!("expected each layer once, got it here and in {first}");
                    return Err(damaged(path, &place.about.module, problem));
                }
                None => {
                    self.at.insert(place.about.module.clone(), self.linears.len());
                    self.linears.push(place);
                }
            }
        }
        self.latents.extend(about.latents.into_iter().enumerate().map(|(i, m)| (m, path.into(), i)));
        Ok(())
    }

    /// Their module names.
    pub fn modules(&self) -> impl Iterator<Item = &str> {
        self.linears.iter().map(|p| p.about.module.as_str())
    }

    /// The number of a layer.
    pub fn find(&self, module: &str) -> Option<usize> {
        self.at.get(module).copied()
    }

    /// How layer `i` fits the calibration text.
    pub fn fit(&self, i: usize) -> Option<Fit> {
        self.linears[i].about.fit.map(Fit::from)
    }

    /// Layer `i`.
    ///
    /// # Errors
    /// [`TrainError::Journal`] naming a file that is not what was written.
    pub fn read(&self, i: usize) -> Result<PtqLinear, TrainError> {
        let Place { path, index, about } = &self.linears[i];
        unpack(&Sealed::open(path, &self.fingerprint)?, *index, about.clone())
    }

    /// The latent weights of a layer that was trained, if they were kept.
    pub(in crate::ptq) fn latent(&self, module: &str) -> Result<Option<Vec<f32>>, TrainError> {
        let Some((_, path, i)) = self.latents.iter().find(|(m, ..)| m == module) else { return Ok(None) };
        Sealed::open(path, &self.fingerprint)?.read_f32(&format!("latent.{i}")).map(Some)
    }

    /// Whether any layer has latent weights.
    pub(in crate::ptq) fn has_latents(&self) -> bool {
        !self.latents.is_empty()
    }
}
