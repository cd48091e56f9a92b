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
/// The `.jpg` and `.jpeg` files of a folder, by name.
///
/// # Errors
/// Exit code 3 for a folder without one or with more than `most`; 4 for one that cannot be read.
pub fn list(dir: &Path, most: usize) -> Result<Vec<PathBuf>, CliError> {
    let at = printable(&dir.to_string_lossy());
    let unreadable = |e: std::io::Error| CliError::new(4, format!("{at}: cannot list: {e}"));
    let mut files = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(unreadable)? {
        let path = entry.map_err(unreadable)?.path();
        let ends = |e: &std::ffi::OsStr| e.eq_ignore_ascii_case("jpg") || e.eq_ignore_ascii_case("jpeg");
        if path.extension().is_some_and(ends) {
            files.push(path);
        }
    }
    files.sort();
    if files.is_empty() || files.len() > most {
        return Err(CliError::new(3, format!("{at}: expected 1 to {most} files .jpg or .jpeg, got {}", files.len())));
    }
    Ok(files)
}

/// Pictures as the model takes them, normalized, `[m, side, side, 3]`.
///
/// # Errors
/// Exit code 3 for a file that is no JPEG picture; 4 for one that cannot be read.
pub fn read(files: &[PathBuf], model: &EfficientNetConfig) -> Result<Vec<f32>, CliError> {
    let one = |file: &PathBuf| picture(file, model).map(|pixels| model.normalize(&pixels));
    Ok(files.par_iter().map(one).collect::<Result<Vec<_>, _>>()?.concat())
}

/// The class of a picture: the digits at the end of its name, behind an underscore (`imagenet_00_243.jpg`: 243).
///
/// # Errors
/// Exit code 3 for a name without one, or a class that the model does not have.
pub fn label(file: &Path, classes: usize) -> Result<u32, CliError> {
    let stem = file.file_stem().unwrap_or_default().to_string_lossy();
    let found = stem.rsplit_once('_').and_then(|(_, n)| n.parse::<u32>().ok());
    found.filter(|&l| (l as usize) < classes).ok_or_else(|| {
        let problem = format!("expected a name that ends in _CLASS with a class below {classes}");
        CliError::new(3, format!("{}: {problem}", printable(&file.to_string_lossy())))
    })
}

/// Pictures of `side` pixels, and each mirrored left to right behind them.
pub fn with_mirrored(mut images: Vec<f32>, side: usize) -> Vec<f32> {
    let mirrored: Vec<f32> =
        images.chunks_exact(side * 3).flat_map(|row| row.chunks_exact(3).rev().flatten()).copied().collect();
    images.extend(mirrored);
    images
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
        let e = list(dir.path(), 5).unwrap_err();
        assert!(e.code() == 3 && e.to_string().contains("expected 1 to 5 files .jpg or .jpeg, got 0"), "{e}");
        let file = dir.path().join("a_1.JPG");
        std::fs::write(&file, b"\xff\xd8\xff\xe0 and so on").unwrap();
        assert_eq!(list(dir.path(), 1).unwrap(), std::slice::from_ref(&file));
        assert_eq!(list(dir.path(), 0).unwrap_err().code(), 3);
        let e = read(&[file], &model).unwrap_err();
        assert!(e.code() == 3 && e.to_string().contains("a_1.JPG: expected a JPEG picture"), "{e}");
        let none = dir.path().join("none");
        assert_eq!(list(&none, 5).unwrap_err().code(), 4);
        assert_eq!(read(&[none], &model).unwrap_err().code(), 4);
        assert_eq!(label(Path::new("x/imagenet_00_243.jpg"), 1000).unwrap(), 243);
        for name in ["cat.jpg", "cat_.jpg", "cat_1000.jpg", "cat_-1.jpg"] {
            let e = label(Path::new(name), 1000).unwrap_err();
            assert!(e.code() == 3 && e.to_string().contains(name), "{e}");
        }
    }

    #[test]
    fn mirrored_pictures_follow_the_others() {
        let images: Vec<f32> = (0..12).map(|i| i as f32).collect();
        let both = with_mirrored(images.clone(), 2);
        assert_eq!(both[..12], images);
        assert_eq!(both[12..], [3.0, 4.0, 5.0, 0.0, 1.0, 2.0, 9.0, 10.0, 11.0, 6.0, 7.0, 8.0]);
    }
}
