//! The quantized layers of a source on their way into a folder: which there are, what each becomes (found in a first reading, of
//! which only schemes and losses are kept), and each made again when its turn to be written comes. Not the conversions themselves
//! (dsq-checkpoint).

use crate::error::CliError;
use dsq_checkpoint::{
    Checkpoint, CommonScheme, Dtype, ExportLoss, ExportTensor, FolderFormat, LinearSpec, LinearWeight, Outline,
    SourceRecord, Workers, convert_layer, finish_layer, printable,
};
use dsq_quant::FloatType;
use std::collections::HashSet;
use std::path::Path;

/// The tensors that layers of codes are made of in a source, by every name that they may have.
pub(in crate::commands) fn packed_names(ckpt: &Checkpoint, specs: &[LinearSpec]) -> HashSet<String> {
    let mut done = HashSet::new();
    for LinearSpec { module, .. } in specs {
        for part in ["", "_packed", "_scale", "_global_scale", "_shape", "_zero_point", "_g_idx"] {
            done.insert(ckpt.part(module, &format!("weight{part}")));
        }
        done.extend(["qweight", "qzeros", "scales", "g_idx"].map(|part| format!("{module}.{part}")));
        done.extend(["input_scale", "input_global_scale", "input_zero_point"].map(|p| format!("{module}.{p}")));
        if ckpt.has_empty_bias(module) {
            done.insert(format!("{module}.bias"));
        }
    }
    done
}

/// The layers of a source that hold codes, or blocks that become codes.
pub(super) struct Layers<'a> {
    file: &'a Path,
    ckpt: &'a Checkpoint,
    /// How codes are stored; `None`: the layers become floats.
    format: Option<FolderFormat>,
    specs: Vec<LinearSpec>,
}

/// What the first reading found.
pub(super) struct Survey {
    /// What each layer becomes; `None`: floats.
    outlines: Vec<Option<Outline>>,
    common: CommonScheme,
    /// Of scales that are rounded to f16, and of groups that lose their order.
    pub(super) loss: ExportLoss,
    /// Layers whose groups are in activation order.
    pub(super) ordered: usize,
    /// Of blocks that are not codes.
    pub(super) blocks: Changed,
}

/// Blocks of a GGUF file whose values change.
#[derive(Default)]
pub(super) struct Changed {
    pub(super) layers: usize,
    /// The first layer, and its type.
    pub(super) first: Option<String>,
    pub(super) max: f64,
    pub(super) relative: f64,
}

impl<'a> Layers<'a> {
    /// Finds the layers.
    pub(super) fn new(file: &'a Path, ckpt: &'a Checkpoint, format: Option<FolderFormat>) -> Self {
        let mut specs = ckpt.config().linears();
        match ckpt.is_gguf() {
            true => specs.retain(|s| format.is_some() && ckpt.has_block_codes(&s.module)),
            false => specs.retain(|s| ckpt.is_quantized(&s.module)),
        }
        Self { file, ckpt, format, specs }
    }

    pub(super) fn specs(&self) -> &[LinearSpec] {
        &self.specs
    }

    /// The tensors of the source that the layers are made of, by every name that they may have.
    pub(super) fn names(&self) -> HashSet<String> {
        packed_names(self.ckpt, &self.specs)
    }

    /// Reads every layer whose codes are kept.
    ///
    /// # Errors
    /// Exit code 2 for layers that the format does not hold; what reading gives.
    pub(super) fn survey(&self, workers: Workers) -> Result<Survey, CliError> {
        let cost = |i: usize| 10 * (self.specs[i].n() * self.specs[i].k()) as u64;
        let one = |i: usize| -> Result<_, CliError> {
            if self.format.is_none() {
                return Ok(None);
            }
            let mut layer = self.read(&self.specs[i])?;
            let ordered = matches!(&layer, ExportTensor::Linear { order: Some(_), .. });
            let format = self.format.unwrap_or_default();
            let blocks = match &layer {
                ExportTensor::Linear { source: Some(s), .. } if s.max_abs_error > 0.0 => Some(s.clone()),
                _ => None,
            };
            let loss = convert_layer(format, self.file, &mut layer)?;
            // What it says of one layer alone, while its values are there; they go.
            finish_layer(format, self.file, &mut layer, &CommonScheme::default())?;
            if let ExportTensor::Linear { matrix, .. } = &mut layer {
                (matrix.codes, matrix.scales, matrix.zeros) = Default::default();
            }
            Ok(Some((layer, blocks, loss, ordered)))
        };
        let found = workers.run(self.specs.len(), cost, one)?;
        let mut survey = Survey {
            outlines: Vec::new(),
            common: CommonScheme::default(),
            loss: ExportLoss::default(),
            ordered: 0,
            blocks: Changed::default(),
        };
        let format = self.format.unwrap_or_default();
        for (spec, (layer, blocks, loss, ordered)) in
            self.specs.iter().zip(&found).filter_map(|(s, f)| Some((s, f.as_ref()?)))
        {
            if let Some(source) = blocks {
                let changed = &mut survey.blocks;
                changed.layers += 1;
                changed.first.get_or_insert_with(|| format!("{} ({})", spec.module, source.dtype));
                changed.max = changed.max.max(source.max_abs_error);
                changed.relative = changed.relative.max(source.relative_error);
            }
            survey.ordered += usize::from(*ordered);
            survey.loss.merge(loss);
            survey.common.add(format, self.file, layer)?;
        }
        for layer in found {
            survey.outlines.push(match layer {
                None => None,
                Some((mut layer, ..)) => {
                    finish_layer(format, self.file, &mut layer, &survey.common)?;
                    Some(Outline::of(&layer))
                }
            });
        }
        Ok(survey)
    }

    /// Layer `i` as it is to be written.
    ///
    /// # Errors
    /// What reading gives.
    pub(super) fn make(&self, i: usize, survey: &Survey, dtype: FloatType) -> Result<ExportTensor, CliError> {
        let spec = &self.specs[i];
        let Some(format) = self.format else {
            let (name, data) = (format!("{}.weight", spec.module), self.ckpt.linear(&spec.module)?.into_f32());
            return Ok(ExportTensor::Float { name, shape: spec.shape.clone(), data, dtype });
        };
        let mut layer = self.read(spec)?;
        convert_layer(format, self.file, &mut layer)?;
        finish_layer(format, self.file, &mut layer, &survey.common)?;
        Ok(layer)
    }

    /// A layer in codes, as the source has it. Of blocks the record of the source comes with it.
    fn read(&self, spec: &LinearSpec) -> Result<ExportTensor, CliError> {
        let (module, shape) = (spec.module.clone(), spec.shape.clone());
        if let Some(matrix) = self.ckpt.block_codes(&module)? {
            let name = format!("{module}.weight");
            let dtype = self.ckpt.info(&name).map(|i| i.dtype).unwrap_or_default();
            let mut values = Vec::new();
            let sha256 = self.ckpt.read_f32_hashed(&name, &mut values)?;
            let source = Some(SourceRecord::with_matrix(sha256, dtype, &values, &matrix));
            return Ok(ExportTensor::Linear { module, shape, matrix, activation: None, source, order: None });
        }
        let (matrix, order) = match self.ckpt.linear(&module)? {
            LinearWeight::Quantized(matrix) => (matrix, None),
            LinearWeight::Ordered { matrix, order } => (matrix, Some(order)),
            LinearWeight::Float { .. } => {
                let at = printable(&self.file.to_string_lossy());
                return Err(CliError::usage(format!("{at}: {module}: expected codes, got floats")));
            }
        };
        // GPTQ and AWQ have no grids of inputs.
        let activation = match self.format {
            Some(FolderFormat::CompressedTensors) => self.ckpt.activation(&module)?,
            _ => None,
        };
        Ok(ExportTensor::Linear { module, shape, matrix, activation, source: None, order })
    }
}

impl Survey {
    /// What is written for the layers, in their order.
    pub(super) fn outlines(&self, layers: &Layers, dtype: FloatType) -> Vec<Outline> {
        let one = |(spec, outline): (&LinearSpec, &Option<Outline>)| {
            outline.clone().unwrap_or_else(|| Outline::Plain {
                name: format!("{}.weight", spec.module),
                shape: spec.shape.clone(),
                dtype: Dtype::from(dtype),
            })
        };
        layers.specs.iter().zip(&self.outlines).map(one).collect()
    }
}
