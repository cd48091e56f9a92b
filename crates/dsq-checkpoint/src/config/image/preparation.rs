//! How pictures become the input of an image model: `preprocessor_config.json` of transformers, every key honoured or refused. Not the
//! decoding and resizing themselves (the command line does that).

use super::MAX_SIDE;
use crate::config::fields::{Fields, show};
use crate::json::read_json;
use crate::{CheckpointError, Fault, Severity};
use serde_json::{Value, json};
use std::path::Path;

/// The file beside `config.json`.
pub(super) const FILE: &str = "preprocessor_config.json";

/// Keys that say nothing about the values of the input: how tensors are handed over, labels of segmentation.
const WITHOUT_MEANING: [&str; 10] = [
    "data_format",
    "default_to_square",
    "device",
    "disable_grouping",
    "do_convert_rgb",
    "input_data_format",
    "processor_class",
    "return_tensors",
    "_valid_processor_keys",
    "_commit_hash",
];

/// Mean and standard deviation of ImageNet's pixels over 255, as torchvision's models are given them.
const MEAN: [f32; 3] = [0.485, 0.456, 0.406];
const STD: [f32; 3] = [0.229, 0.224, 0.225];
/// One over 255.
const RESCALE: f32 = (1.0 / 255.0f64) as f32;

/// How a picture is cut out and resized, and what its pixels become: `(pixel * rescale - mean) / std` of the channel.
#[derive(Debug, Clone, PartialEq)]
pub struct Preparation {
    /// Height and width of the input.
    pub size: [usize; 2],
    /// How a picture comes to that size.
    pub resize: Resize,
    /// How pixels are interpolated, over a wider window where a picture shrinks.
    pub filter: Filter,
    /// Factor of a pixel of 0 to 255.
    pub rescale: f32,
    /// Mean of each channel.
    pub mean: Vec<f32>,
    /// Standard deviation of each channel.
    pub std: Vec<f32>,
}

/// Where the input lies in a picture.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Resize {
    /// The central square of this share of the shorter side is resized.
    Square(f32),
    /// The picture is resized until its shorter side has this many pixels, and the centre taken.
    Shorter(usize),
    /// The picture is stretched to this height and width, and the centre taken.
    Stretched([usize; 2]),
}

/// Interpolation, by Pillow's names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Filter {
    /// Nearest pixel.
    Nearest,
    /// Lanczos, three lobes.
    Lanczos,
    /// Linear.
    Bilinear,
    /// Cubic with a = -0.5.
    Bicubic,
}

/// Pillow's numbers.
const FILTERS: [(i64, Filter); 4] =
    [(0, Filter::Nearest), (1, Filter::Lanczos), (2, Filter::Bilinear), (3, Filter::Bicubic)];

impl Preparation {
    /// What torchvision gives its models of ImageNet: the shorter side becomes 256 (of 224), bilinear, then the centre.
    pub(super) fn imagenet(size: [usize; 2], channels: usize) -> Self {
        let each = |values: [f32; 3]| (0..channels).map(|c| values[c % 3]).collect();
        let shorter = (size[0].max(size[1]) * 256).div_ceil(224);
        let (resize, filter) = (Resize::Shorter(shorter), Filter::Bilinear);
        Self { size, resize, filter, rescale: RESCALE, mean: each(MEAN), std: each(STD) }
    }

    /// Pixels `[m, h, w, c]` as the network's input. The calibration and the runtime both call this.
    pub fn normalize(&self, pixels: &[u8]) -> Vec<f32> {
        let channels = self.mean.iter().zip(&self.std).cycle();
        pixels.iter().zip(channels).map(|(&p, (mean, std))| (f32::from(p) * self.rescale - mean) / std).collect()
    }

    /// Takes over what `preprocessor_config.json` in `dir` says; without one nothing changes, and that is told.
    pub(super) fn read(&mut self, dir: &Path, channels: usize, faults: &mut Vec<Fault>) -> Result<(), CheckpointError> {
        let file = dir.join(FILE);
        if file.symlink_metadata().is_err() {
            let what = format!("absent; pictures are prepared as for torchvision's models: {}", self.describe());
            faults.push(Fault::new(Severity::Note, &file, "", what));
            return Ok(());
        }
        let value = read_json(&file)?;
        let found = Self::from_fields(&Fields::new(&value, &file, "")?, channels)?;
        *self = found;
        Ok(())
    }

    fn from_fields(f: &Fields, channels: usize) -> Result<Self, CheckpointError> {
        let kind = f.string("image_processor_type")?;
        let old = f.string("feature_extractor_type")?;
        let kind = f.required("image_processor_type", Ok(kind.or(old)))?;
        let starts = |names: &[&str]| names.iter().any(|n| kind.starts_with(n));
        let convnext = starts(&["ConvNext"]);
        if !convnext && !starts(&["MobileNetV2", "ViT", "Bit", "CLIP"]) {
            let what = "a processor of ConvNext, MobileNetV2, ViT, Bit or CLIP";
            return Err(f.error("image_processor_type", format!("expected {what}, got {kind}")));
        }
        for (key, why) in [
            ("do_resize", "pictures of any size are resized here"),
            ("do_rescale", "pixels are rescaled here"),
            ("do_normalize", "pixels are normalized here"),
        ] {
            f.only(key, &json!(true), why)?;
        }
        for key in ["do_pad", "do_flip_channel_order", "do_reduce_labels"] {
            f.only(key, &json!(false), "dsq does not do this")?;
        }
        f.only("pad_size", &Value::Null, "dsq does not pad pictures")?;
        let side = |key: &'static str, v: &Value| {
            let n = v.as_i64().filter(|n| (1..=MAX_SIDE).contains(n)).map(|n| n as usize);
            n.ok_or_else(|| f.error(key, format!("expected sizes from 1 to {MAX_SIDE}, got {}", show(v))))
        };
        // `{"height": H, "width": W}`.
        let both = |key: &'static str, v: &Value| match (v.get("height"), v.get("width"), v.as_object()) {
            (Some(h), Some(w), Some(map)) if map.len() == 2 => Ok(Some([side(key, h)?, side(key, w)?])),
            _ => Ok::<_, CheckpointError>(None),
        };
        let given = f.required("size", Ok(f.get("size")))?;
        let shortest = given.get("shortest_edge").filter(|_| given.as_object().is_some_and(|m| m.len() == 1));
        let resize = match (both("size", given)?, shortest) {
            (Some(size), _) => Resize::Stretched(size),
            (None, Some(edge)) => Resize::Shorter(side("size", edge)?),
            (None, None) if given.is_object() => {
                let problem = format!("expected shortest_edge, or height and width, got {}", show(given));
                return Err(f.error("size", problem));
            }
            // A number alone: of ViT a square, of the others the shorter side.
            (None, None) if starts(&["ViT"]) => Resize::Stretched([side("size", given)?; 2]),
            (None, None) => Resize::Shorter(side("size", given)?),
        };
        let crop = match f.get("crop_size") {
            None => None,
            Some(v) => match both("crop_size", v)? {
                Some(size) => Some(size),
                None => Some([side("crop_size", v)?; 2]),
            },
        };
        let cropped = f.boolean("do_center_crop")?;
        let share = f.number("crop_pct")?;
        let (size, resize) = match resize {
            // Below 384 the centre of a larger picture, else the picture stretched (transformers' rule).
            Resize::Shorter(edge) if convnext => {
                if cropped == Some(true) {
                    return Err(f.error("do_center_crop", "expected false for a ConvNext processor, got true"));
                }
                let share = share.unwrap_or(0.875);
                if !(0.1..=1.0).contains(&share) {
                    return Err(f.error("crop_pct", format!("expected 0.1 to 1, got {share}")));
                }
                let resize = match edge < 384 {
                    true => Resize::Shorter((edge as f64 / share) as usize),
                    false => Resize::Stretched([edge; 2]),
                };
                ([edge; 2], resize)
            }
            _ if convnext => {
                return Err(f.error("size", "expected shortest_edge for a ConvNext processor, got height and width"));
            }
            Resize::Stretched(size) => (if cropped == Some(true) { crop.unwrap_or(size) } else { size }, resize),
            _ => match crop.filter(|_| cropped != Some(false)) {
                Some(crop) => (crop, resize),
                None => {
                    let problem =
                        "expected one size for all pictures, got shortest_edge without do_center_crop and crop_size";
                    return Err(f.error("crop_size", problem));
                }
            },
        };
        if let (false, Some(share)) = (convnext, share) {
            return Err(f.error("crop_pct", format!("expected it in a ConvNext processor alone, got {share}")));
        }
        let room = match resize {
            Resize::Shorter(edge) => [edge; 2],
            Resize::Stretched(size) => size,
            Resize::Square(_) => size,
        };
        if size[0] > room[0] || size[1] > room[1] {
            let problem = format!("expected at most the size {room:?} that pictures are resized to, got {size:?}");
            return Err(f.error("crop_size", problem));
        }
        let resample = f.required("resample", f.integer("resample", 0..=5))?;
        let Some(&(_, filter)) = FILTERS.iter().find(|(n, _)| *n == resample) else {
            let what = "0 (nearest), 1 (Lanczos), 2 (bilinear) or 3 (bicubic)";
            return Err(f.error("resample", format!("expected {what}, got {resample}")));
        };
        let numbers = |key: &'static str, least: f64| -> Result<Vec<f32>, CheckpointError> {
            let list = f.required(key, f.list(key))?;
            let one = |v: &Value| v.as_f64().filter(|x| (least..=1e6).contains(x)).map(|x| x as f32);
            let values: Option<Vec<f32>> = list.iter().map(one).collect();
            values.filter(|v| v.len() == channels).ok_or_else(|| {
                let what = format!("{channels} numbers (num_channels) from {least} to 1e6");
                f.error(key, format!("expected {what}, got {}", show(&json!(list))))
            })
        };
        let rescale = f.number("rescale_factor")?.map_or(RESCALE, |x| x as f32);
        if !(rescale > 0.0 && rescale <= 1.0) {
            return Err(f.error("rescale_factor", format!("expected above 0, at most 1, got {rescale}")));
        }
        let (mean, std) = (numbers("image_mean", -1e6)?, numbers("image_std", 1e-6)?);
        f.refuse_the_rest(&WITHOUT_MEANING)?;
        Ok(Self { size, resize, filter, rescale, mean, std })
    }

    /// As transformers writes it, with the processor that does just this; `None` where none does.
    pub(super) fn to_json(&self) -> Option<Value> {
        let [h, w] = self.size;
        let size = match self.resize {
            Resize::Square(_) => return None,
            Resize::Shorter(edge) => json!({"shortest_edge": edge}),
            Resize::Stretched([h, w]) => json!({"height": h, "width": w}),
        };
        let list = |xs: &[f32]| xs.iter().map(|&x| short(x)).collect::<Vec<_>>();
        let resample = FILTERS.iter().find(|(_, f)| *f == self.filter).map_or(2, |(n, _)| *n);
        Some(json!({
            "image_processor_type": "BitImageProcessor",
            "do_resize": true,
            "size": size,
            "resample": resample,
            "do_center_crop": true,
            "crop_size": {"height": h, "width": w},
            "do_rescale": true,
            "rescale_factor": short(self.rescale),
            "do_normalize": true,
            "image_mean": list(&self.mean),
            "image_std": list(&self.std),
        }))
    }

    /// For a person: sizes, interpolation and the formula.
    pub fn describe(&self) -> String {
        let [h, w] = self.size;
        let how = match self.resize {
            Resize::Square(share) => format!("the central square of {share} of the shorter side to {h} x {w}"),
            Resize::Shorter(edge) => format!("shorter side to {edge}, centre of {h} x {w}"),
            Resize::Stretched([a, b]) => format!("to {a} x {b}, centre of {h} x {w}"),
        };
        format!("{how}, {:?}, {}", self.filter, self.formula())
    }

    /// What becomes of a pixel of 0 to 255.
    pub fn formula(&self) -> String {
        format!("(pixel * {} - mean) / std, mean {:?}, std {:?}", self.rescale, self.mean, self.std)
    }
}

/// An f32 as the shortest decimal that gives it back.
pub(super) fn short(x: f32) -> f64 {
    x.to_string().parse().unwrap_or_else(|_| f64::from(x))
}
