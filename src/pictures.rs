//! Pictures for image models: a folder of JPEG files, decoded, cropped to their central square and resized to what the model
//! takes. Labels stand at the end of the file names. Not the network, and not the data sets of recipes (see dsq-train's `idx`).

use crate::error::CliError;
use dsq_checkpoint::{EfficientNetConfig, printable};
use image::imageops::FilterType;
use image::{DynamicImage, ImageReader, Limits};
use rayon::prelude::*;
use std::path::{Path, PathBuf};

/// Largest width and height of a picture.
const MAX_SIDE: u32 = 16_384;
/// Most pictures of a folder: their floats are in memory all together.
const MAX_PICTURES: usize = 10_000;

/// Pictures as the model takes them, in the order of their file names.
pub struct Pictures {
    /// The files.
    pub files: Vec<PathBuf>,
    /// Normalized, `[m, side, side, 3]`.
    pub images: Vec<f32>,
}

impl Pictures {
    /// Reads every `.jpg` and `.jpeg` file of a folder.
    ///
    /// # Errors
    /// Exit code 3 for a folder without one, with more than 10,000, or a file that is no such picture; 4 for one that cannot
    /// be read.
    pub fn read(dir: &Path, model: &EfficientNetConfig) -> Result<Self, CliError> {
        let at = printable(&dir.to_string_lossy());
        let list = std::fs::read_dir(dir).map_err(|e| CliError::new(4, format!("{at}: cannot list: {e}")))?;
        let mut files = Vec::new();
        for entry in list {
            let path = entry.map_err(|e| CliError::new(4, format!("{at}: cannot list: {e}")))?.path();
            let ends = |e: &std::ffi::OsStr| e.eq_ignore_ascii_case("jpg") || e.eq_ignore_ascii_case("jpeg");
            if path.extension().is_some_and(ends) {
                files.push(path);
            }
        }
        files.sort();
        if files.is_empty() || files.len() > MAX_PICTURES {
            let problem = format!("{at}: expected 1 to {MAX_PICTURES} files .jpg or .jpeg, got {}", files.len());
            return Err(CliError::new(3, problem));
        }
        let one = |file: &PathBuf| picture(file, model).map(|pixels| model.normalize(&pixels));
        let images = files.par_iter().map(one).collect::<Result<Vec<_>, _>>()?.concat();
        Ok(Self { files, images })
    }

    /// The class of each picture: the digits at the end of its name, behind an underscore (`imagenet_00_243.jpg`: 243).
    ///
    /// # Errors
    /// Exit code 3 for a name without one, or a class that the model does not have.
    pub fn labels(&self, classes: usize) -> Result<Vec<u32>, CliError> {
        let label = |file: &PathBuf| {
            let stem = file.file_stem().unwrap_or_default().to_string_lossy();
            let found = stem.rsplit_once('_').and_then(|(_, n)| n.parse::<u32>().ok());
            found.filter(|&l| (l as usize) < classes).ok_or_else(|| {
                let problem = format!("expected a name that ends in _CLASS with a class below {classes}");
                CliError::new(3, format!("{}: {problem}", printable(&file.to_string_lossy())))
            })
        };
        self.files.iter().map(label).collect()
    }

    /// The pictures, and each mirrored left to right.
    pub fn with_mirrored(&self, model: &EfficientNetConfig) -> Vec<f32> {
        let mut out = self.images.clone();
        for row in self.images.chunks_exact(model.image_size * 3) {
            row.chunks_exact(3).rev().for_each(|pixel| out.extend_from_slice(pixel));
        }
        out
    }
}

/// Pixels `[side, side, 3]` of a picture: the central square of `crop` times the shorter side, resized by bicubic
/// interpolation (a = -0.5, widened where it shrinks), as the model's authors do.
fn picture(file: &Path, model: &EfficientNetConfig) -> Result<Vec<u8>, CliError> {
    let at = printable(&file.to_string_lossy());
    let invalid = |e: image::ImageError| match e {
        image::ImageError::IoError(e) if e.kind() != std::io::ErrorKind::UnexpectedEof => {
            CliError::new(4, format!("{at}: cannot read: {e}"))
        }
        e => CliError::new(3, format!("{at}: expected a JPEG picture: {e}")),
    };
    let mut reader = ImageReader::open(file).map_err(|e| invalid(e.into()))?;
    reader.set_format(image::ImageFormat::Jpeg);
    let mut limits = Limits::default();
    (limits.max_image_width, limits.max_image_height) = (Some(MAX_SIDE), Some(MAX_SIDE));
    reader.limits(limits);
    let picture: DynamicImage = reader.decode().map_err(invalid)?;
    let rgb = picture.to_rgb8();
    let (width, height) = rgb.dimensions();
    let square = ((width.min(height) as f32 * model.crop) as u32).max(1);
    let (left, top) = ((width - square).div_ceil(2), (height - square).div_ceil(2));
    let part = image::imageops::crop_imm(&rgb, left, top, square, square).to_image();
    let side = model.image_size as u32;
    let pixels = if square == side { part } else { image::imageops::resize(&part, side, side, FilterType::CatmullRom) };
    Ok(pixels.into_raw())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn f088_what_is_no_picture_or_has_no_label_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let model = EfficientNetConfig { image_size: 32, ..EfficientNetConfig::default() };
        let refused = |code: u8, words: &str| {
            let e = Pictures::read(dir.path(), &model).map(|_| ()).unwrap_err();
            assert!(e.code() == code && e.to_string().contains(words), "{e}");
        };
        refused(3, "1 to 10000 files");
        std::fs::write(dir.path().join("a_1.jpg"), b"\xff\xd8\xff\xe0 and so on").unwrap();
        refused(3, "a_1.jpg: expected a JPEG picture");
        let named = |name: &str| Pictures { files: vec![name.into()], images: Vec::new() };
        assert_eq!(named("x/imagenet_00_243.jpg").labels(1000).unwrap(), [243]);
        for name in ["cat.jpg", "cat_.jpg", "cat_1000.jpg", "cat_-1.jpg"] {
            let e = named(name).labels(1000).unwrap_err();
            assert!(e.code() == 3 && e.to_string().contains(name), "{e}");
        }
        let none = Pictures::read(&dir.path().join("none"), &model).map(|_| ()).unwrap_err();
        assert_eq!(none.code(), 4);
    }

    #[test]
    fn mirrored_pictures_follow_the_others() {
        let model = EfficientNetConfig { image_size: 2, ..EfficientNetConfig::default() };
        let images: Vec<f32> = (0..12).map(|i| i as f32).collect();
        let both = Pictures { files: Vec::new(), images: images.clone() }.with_mirrored(&model);
        assert_eq!(both[..12], images);
        assert_eq!(both[12..], [3.0, 4.0, 5.0, 0.0, 1.0, 2.0, 9.0, 10.0, 11.0, 6.0, 7.0, 8.0]);
    }
}
