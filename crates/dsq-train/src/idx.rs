//! Pictures and labels in IDX files (the MNIST family's format), plain or gzip'ed. Strict: every disagreement between a
//! header and the bytes is an error that names the file. Not an image decoder.
//!
//! Format: big endian u32 magic (0x803 pictures, 0x801 labels: unsigned bytes, 3 or 1 dimensions), one u32 for each dimension,
//! then one byte for each element.

use crate::TrainError;
use std::fs::File;
use std::io::{BufReader, Read};
use std::path::Path;

const PICTURES: u32 = 0x803;
const LABELS: u32 = 0x801;
/// Largest data set that is read: 4 GiB of pixels.
const MAX_BYTES: u64 = 1 << 32;

/// Gray pictures with labels.
#[derive(Debug, Clone, PartialEq)]
pub struct Pictures {
    /// Height and width.
    pub size: [usize; 2],
    /// `[m, h, w]`.
    pub pixels: Vec<u8>,
    /// `[m]`.
    pub labels: Vec<u8>,
}

impl Pictures {
    /// Reads a pair of files and checks that they belong together and that labels lie below `classes`; keeps the first `limit`
    /// pictures when a limit is given.
    ///
    /// # Errors
    /// [`TrainError::Artifact`] for a file that is no IDX file of its kind, truncated or too long, counts that differ, a label out
    /// of range, or no picture; [`TrainError::Io`].
    pub fn read(images: &Path, labels: &Path, classes: usize, limit: Option<usize>) -> Result<Self, TrainError> {
        let (dims, mut pixels) = read_idx(images, PICTURES)?;
        let (count, mut marks) = read_idx(labels, LABELS)?;
        let broken = |path: &Path, problem: String| TrainError::Artifact { path: path.into(), problem };
        let (m, h, w) = (dims[0], dims[1], dims[2]);
        if m != count[0] {
            return Err(broken(
                labels,
                format!("expected {m} labels as {} has pictures, got {}", images.display(), count[0]),
            ));
        }
        if m * h * w == 0 {
            return Err(broken(images, format!("expected at least one pixel, got {m} pictures of {h} x {w}")));
        }
        if let Some(i) = marks.iter().position(|&l| usize::from(l) >= classes) {
            return Err(broken(labels, format!("label {i}: expected 0 to {}, got {}", classes - 1, marks[i])));
        }
        let keep = limit.unwrap_or(m).min(m);
        pixels.truncate(keep * h * w);
        marks.truncate(keep);
        Ok(Self { size: [h, w], pixels, labels: marks })
    }

    /// Pictures.
    pub fn len(&self) -> usize {
        self.labels.len()
    }

    /// Whether there is none (never after [`Pictures::read`]).
    pub fn is_empty(&self) -> bool {
        self.labels.is_empty()
    }

    /// The pixels of picture `i`.
    pub fn picture(&self, i: usize) -> &[u8] {
        let len = self.size[0] * self.size[1];
        &self.pixels[i * len..(i + 1) * len]
    }
}

/// The dimensions and the bytes of an IDX file of this magic.
fn read_idx(path: &Path, magic: u32) -> Result<(Vec<usize>, Vec<u8>), TrainError> {
    let broken = |problem: String| TrainError::Artifact { path: path.into(), problem };
    let open = || File::open(path).map_err(TrainError::io(path, "open"));
    let mut head = Vec::new();
    open()?.take(2).read_to_end(&mut head).map_err(TrainError::io(path, "read"))?;
    let file = BufReader::new(open()?);
    let mut data: Box<dyn Read> =
        if head == [0x1f, 0x8b] { Box::new(flate2::read::MultiGzDecoder::new(file)) } else { Box::new(file) };
    let mut word = |what: &str| -> Result<u32, TrainError> {
        let mut bytes = [0u8; 4];
        data.read_exact(&mut bytes).map_err(|e| match e.kind() {
            std::io::ErrorKind::UnexpectedEof => broken(format!("truncated: expected {what}, got the end of the file")),
            std::io::ErrorKind::InvalidInput | std::io::ErrorKind::InvalidData => {
                broken(format!("not a gzip file: {e}"))
            }
            _ => TrainError::io(path, "read")(e),
        })?;
        Ok(u32::from_be_bytes(bytes))
    };
    let got = word("the magic number")?;
    if got != magic {
        let kind = if magic == PICTURES { "pictures" } else { "labels" };
        return Err(broken(format!("magic number: expected {magic:#010x} (IDX {kind}), got {got:#010x}")));
    }
    let dims = (0..magic & 0xff)
        .map(|i| word(&format!("dimension {i}")).map(|d| d as usize))
        .collect::<Result<Vec<_>, _>>()?;
    let want = dims.iter().try_fold(1u64, |n, &d| n.checked_mul(d as u64)).filter(|&n| n <= MAX_BYTES);
    let want =
        want.ok_or_else(|| broken(format!("dimensions: expected at most {MAX_BYTES} bytes in all, got {dims:?}")))?;
    // One byte more than the header says: a longer file shows, a hostile one does not fill the memory.
    let mut bytes = Vec::new();
    data.take(want + 1).read_to_end(&mut bytes).map_err(|e| match e.kind() {
        std::io::ErrorKind::UnexpectedEof | std::io::ErrorKind::InvalidInput | std::io::ErrorKind::InvalidData => {
            broken(format!("broken gzip stream: {e}"))
        }
        _ => TrainError::io(path, "read")(e),
    })?;
    if bytes.len() as u64 != want {
        let got = if bytes.len() as u64 > want { "more".into() } else { bytes.len().to_string() };
        return Err(broken(format!("dimensions {dims:?} need {want} bytes after the header, got {got}")));
    }
    Ok((dims, bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn idx(magic: u32, dims: &[u32], data: &[u8]) -> Vec<u8> {
        let mut out = magic.to_be_bytes().to_vec();
        dims.iter().for_each(|d| out.extend(d.to_be_bytes()));
        out.extend(data);
        out
    }

    fn gzip(bytes: &[u8]) -> Vec<u8> {
        let mut e = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        e.write_all(bytes).unwrap();
        e.finish().unwrap()
    }

    /// Reads `images` and `labels` written to files; the error's text without the folder.
    fn read(images: &[u8], labels: &[u8], limit: Option<usize>) -> Result<Pictures, String> {
        let dir = tempfile::tempdir().unwrap();
        let (i, l) = (dir.path().join("i"), dir.path().join("l"));
        std::fs::write(&i, images).unwrap();
        std::fs::write(&l, labels).unwrap();
        Pictures::read(&i, &l, 10, limit).map_err(|e| {
            assert_eq!(e.exit_code(), 3);
            e.to_string().replace(&format!("{}/", dir.path().display()), "")
        })
    }

    #[test]
    fn plain_and_gzipped_files_read_alike() {
        let images = idx(0x803, &[3, 2, 1], &[1, 2, 3, 4, 5, 6]);
        let labels = idx(0x801, &[3], &[9, 0, 4]);
        let plain = read(&images, &labels, None).unwrap();
        assert_eq!(plain, Pictures { size: [2, 1], pixels: vec![1, 2, 3, 4, 5, 6], labels: vec![9, 0, 4] });
        assert_eq!(read(&gzip(&images), &gzip(&labels), None).unwrap(), plain);
        assert_eq!(plain.picture(1), [3, 4]);
        let two = read(&images, &labels, Some(2)).unwrap();
        assert_eq!((two.len(), two.pixels.len()), (2, 4));
        assert_eq!(read(&images, &labels, Some(99)).unwrap(), plain);
    }

    #[test]
    fn every_disagreement_is_named() {
        let images = idx(0x803, &[2, 1, 1], &[1, 2]);
        let labels = idx(0x801, &[2], &[0, 1]);
        let error = |i: &[u8], l: &[u8]| read(i, l, None).unwrap_err();
        assert_eq!(error(&labels, &labels), "i: magic number: expected 0x00000803 (IDX pictures), got 0x00000801");
        assert_eq!(error(&images, &images), "l: magic number: expected 0x00000801 (IDX labels), got 0x00000803");
        assert_eq!(error(&images[..17], &labels), "i: dimensions [2, 1, 1] need 2 bytes after the header, got 1");
        assert_eq!(
            error(&[images.clone(), vec![0]].concat(), &labels),
            "i: dimensions [2, 1, 1] need 2 bytes after the header, got more"
        );
        assert_eq!(error(&images[..10], &labels), "i: truncated: expected dimension 1, got the end of the file");
        assert_eq!(error(&[], &labels), "i: truncated: expected the magic number, got the end of the file");
        assert!(error(&images, &idx(0x801, &[1], &[0])).starts_with("l: expected 2 labels as "));
        assert_eq!(error(&images, &idx(0x801, &[2], &[0, 10])), "l: label 1: expected 0 to 9, got 10");
        assert_eq!(
            error(&idx(0x803, &[0, 28, 28], &[]), &idx(0x801, &[0], &[])),
            "i: expected at least one pixel, got 0 pictures of 28 x 28"
        );
        let huge = idx(0x803, &[u32::MAX, u32::MAX, u32::MAX], &[]);
        assert!(error(&huge, &labels).starts_with("i: dimensions: expected at most"));
        let packed = gzip(&images);
        assert!(error(&packed[..packed.len() - 6], &labels).contains("i: "));
        let mut flipped = packed.clone();
        let at = flipped.len() - 6;
        flipped[at] ^= 1;
        assert!(error(&flipped, &labels).starts_with("i: broken gzip stream"));
        assert!(matches!(
            Pictures::read(Path::new("no/such/file"), Path::new("l"), 10, None),
            Err(TrainError::Io { action: "open", .. })
        ));
    }
}
