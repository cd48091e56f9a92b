//! Pictures for image models: a folder of JPEG files, decoded, cropped to their central square and resized to what the model
//! takes. Labels stand at the end of the file names. Not the network, and not the data sets of recipes (see dsq-train's `idx`).

use crate::error::CliError;
use dsq_checkpoint::{Filter, ImageConfig, Preparation, Resize, printable};
use image::imageops::FilterType;
use image::{DynamicImage, ImageReader, Limits, RgbImage};
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

/// Pictures as the model takes them, normalized, `[m, h, w, 3]`.
///
/// # Errors
/// Exit code 2 for a model of pictures without colours; 3 for a file that is no JPEG picture, or one so long that it cannot be resized;
/// 4 for one that cannot be read.
pub fn read(files: &[PathBuf], model: &ImageConfig) -> Result<Vec<f32>, CliError> {
    if model.channels != 3 {
        let problem = format!("pictures have 3 channels; expected a model that takes 3, got {}", model.channels);
        return Err(CliError::usage(format!("num_channels: {problem}")));
    }
    let one = |file: &PathBuf| picture(file, &model.preparation).map(|pixels| model.preparation.normalize(&pixels));
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

/// Pictures of this width, and each mirrored left to right behind them.
pub fn with_mirrored(mut images: Vec<f32>, width: usize) -> Vec<f32> {
    let mirrored: Vec<f32> =
        images.chunks_exact(width * 3).flat_map(|row| row.chunks_exact(3).rev().flatten()).copied().collect();
    images.extend(mirrored);
    images
}

/// Pixels `[h, w, 3]` of a picture, cut out and resized as the model's authors do.
fn picture(file: &Path, how: &Preparation) -> Result<Vec<u8>, CliError> {
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
    let [h, w] = how.size.map(|side| side as u32);
    let filter = match how.filter {
        Filter::Nearest => FilterType::Nearest,
        Filter::Lanczos => FilterType::Lanczos3,
        Filter::Bilinear => FilterType::Triangle,
        Filter::Bicubic => FilterType::CatmullRom,
    };
    let resized = |picture: RgbImage, w: u32, h: u32| match picture.dimensions() == (w, h) {
        true => picture,
        false => image::imageops::resize(&picture, w, h, filter),
    };
    let shorter = width.min(height).max(1);
    let whole = match how.resize {
        Resize::Square(share) => {
            let square = ((shorter as f32 * share) as u32).max(1);
            let (left, top) = ((width - square).div_ceil(2), (height - square).div_ceil(2));
            let part = image::imageops::crop_imm(&rgb, left, top, square, square).to_image();
            return Ok(resized(part, w, h).into_raw());
        }
        Resize::Stretched([h, w]) => resized(rgb, w as u32, h as u32),
        Resize::Shorter(edge) => {
            // transformers and torchvision cut the fraction off the longer side.
            let [w, h] = [width, height].map(|side| edge as u64 * u64::from(side) / u64::from(shorter));
            if w.max(h) > u64::from(MAX_SIDE) {
                let problem = format!("expected at most {MAX_SIDE} pixels a side once it is resized, got {w} x {h}");
                return Err(CliError::new(3, format!("{at}: {problem}")));
            }
            resized(rgb, w as u32, h as u32)
        }
    };
    // The centre; of half a pixel the even one, as torchvision does.
    let start = |have: u32, want: u32| (f64::from(have - want) / 2.0).round_ties_even() as u32;
    let (width, height) = whole.dimensions();
    let part = image::imageops::crop_imm(&whole, start(width, w), start(height, h), w, h).to_image();
    Ok(part.into_raw())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn f088_what_is_no_picture_or_has_no_label_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let model = ImageConfig::efficientnet_lite0(32, 1000);
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
    fn pictures_are_cut_and_resized_as_torchvision_does() {
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/image");
        let kept = dsq_checkpoint::SafetensorsFile::open(&golden.join("picture.safetensors")).unwrap();
        for (name, size, resize, filter) in [
            ("shorter_48", [33, 47], Resize::Shorter(48), Filter::Bilinear),
            ("stretched_40_50", [40, 50], Resize::Stretched([40, 50]), Filter::Bicubic),
            ("larger_100", [51, 60], Resize::Shorter(100), Filter::Bilinear),
        ] {
            let how = Preparation { size, resize, filter, rescale: 1.0, mean: vec![0.0; 3], std: vec![1.0; 3] };
            let (got, want) = (picture(&golden.join("picture.jpg"), &how).unwrap(), kept.read_stored(name).unwrap().1);
            assert_eq!(got.len(), want.len(), "{name}");
            let off: Vec<i32> = got.iter().zip(&want).map(|(g, w)| (i32::from(*g) - i32::from(*w)).abs()).collect();
            let (mean, worst) = (off.iter().sum::<i32>() as f64 / off.len() as f64, off.iter().max().unwrap());
            // Two JPEG decoders and two roundings; one pixel off to a side would be tens.
            assert!(mean < 1.0 && *worst <= 8, "{name}: mean {mean}, worst {worst}");
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
