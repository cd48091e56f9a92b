//! Files of a journal: safetensors that hold a SHA-256 of each of their tensors, compared whenever one is read, so that what a disk changed
//! never passes for what was written; and their own name (which has a block's number) and the fingerprint of their run, so that a file
//! never passes for another one. Written whole or not at all (dsq-checkpoint). Not what the tensors mean (see `blocks.rs`).

use crate::TrainError;
use crate::run_dir::differences;
use dsq_checkpoint::{Dtype, NamedTensor, SafetensorsFile, TensorData, hex_of, write_safetensors};
use dsq_quant::FloatType;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::path::Path;

/// The tensor of checksums: 32 bytes for each other tensor, in the order of their names.
const SUMS: &str = "sha256";
/// The tensor of what is no tensor, as JSON.
const ABOUT: &str = "about";
/// The tensor of the [`Seal`], as JSON.
const SEAL: &str = "seal";

/// Which file this is, of which run.
#[derive(Serialize, Deserialize)]
struct Seal {
    file: String,
    fingerprint: Value,
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Over everything that a tensor is.
fn digest(name: &str, dtype: Dtype, shape: &[usize], bytes: &[u8]) -> [u8; 32] {
    let mut hash = Sha256::new();
    hash.update(format!("{name:?} {dtype} {shape:?} "));
    hash.update(bytes);
    hash.finalize().into()
}

/// Writes `tensors` and `about` as a file of the run of this `fingerprint`; no tensor may have one of the three names above.
pub(super) fn write(
    path: &Path,
    fingerprint: &Value,
    mut tensors: Vec<NamedTensor>,
    about: &impl serde::Serialize,
) -> Result<(), TrainError> {
    let raw = |name: &str, bytes: Vec<u8>| {
        let data = TensorData::Raw { shape: vec![bytes.len()], bytes, dtype: Dtype::U8 };
        NamedTensor { name: name.into(), data }
    };
    let failed = |e: serde_json::Error| damaged(path, ABOUT, format!("cannot be written: {e}"));
    let seal = Seal { file: file_name(path), fingerprint: fingerprint.clone() };
    tensors.push(raw(ABOUT, serde_json::to_vec(about).map_err(failed)?));
    tensors.push(raw(SEAL, serde_json::to_vec(&seal).map_err(failed)?));
    tensors.sort_by(|a, b| a.name.cmp(&b.name));
    let sum = |t: &NamedTensor| digest(&t.name, t.data.dtype(), t.data.shape(), &t.data.to_bytes());
    let sums = tensors.iter().flat_map(sum).collect();
    tensors.push(raw(SUMS, sums));
    Ok(write_safetensors(path, &tensors)?)
}

/// Floats, as they are.
pub(super) fn floats(name: String, shape: Vec<usize>, data: Vec<f32>) -> NamedTensor {
    NamedTensor { name, data: TensorData::Float { shape, data, dtype: FloatType::F32 } }
}

/// A file that is not what was written.
pub(super) fn damaged(path: &Path, field: &str, problem: impl std::fmt::Display) -> TrainError {
    TrainError::Journal { path: path.into(), problem: format!("{field}: {problem}") }
}

/// An open file.
#[derive(Debug)]
pub(super) struct Sealed {
    file: SafetensorsFile,
    /// All names but that of the checksums, sorted.
    names: Vec<String>,
    sums: Vec<u8>,
}

impl Sealed {
    /// Opens a file of the run of this `fingerprint`; of its tensors none is read but the checksums and the seal.
    ///
    /// # Errors
    /// [`TrainError::Journal`] for a file that is cut or no such file, one that was written under another name and one of another
    /// run (each field that differs is named with both values); [`TrainError::Checkpoint`] where it cannot be read.
    pub(super) fn open(path: &Path, fingerprint: &Value) -> Result<Self, TrainError> {
        let invalid = |e: dsq_checkpoint::CheckpointError| match e.exit_code() {
            3 => damaged(path, "damaged", e),
            _ => e.into(),
        };
        let file = SafetensorsFile::open(path).map_err(invalid)?;
        let (_, sums) = file.read_stored(SUMS).map_err(invalid)?;
        let mut names: Vec<String> = file.names().filter(|n| *n != SUMS).map(str::to_owned).collect();
        names.sort();
        if sums.len() != 32 * names.len() {
            let problem =
                format!("expected {} bytes for {} tensors, got {}", 32 * names.len(), names.len(), sums.len());
            return Err(damaged(path, SUMS, problem));
        }
        let opened = Self { file, names, sums };
        let seal: Seal = opened.json(SEAL)?;
        let name = file_name(path);
        if seal.file != name {
            return Err(damaged(path, "file", format!("expected what was written as {name}, got {}", seal.file)));
        }
        let differences = differences(fingerprint, &seal.fingerprint);
        if !differences.is_empty() {
            return Err(damaged(path, "of another run", differences.join("; ")));
        }
        Ok(opened)
    }

    fn path(&self) -> &Path {
        self.file.path()
    }

    /// The shape of a tensor, if it is there.
    pub(super) fn shape(&self, name: &str) -> Option<Vec<usize>> {
        self.file.info(name).map(|i| i.shape)
    }

    /// The bytes of a tensor, as they were written.
    ///
    /// # Errors
    /// [`TrainError::Journal`] for other bytes, or none.
    pub(super) fn read(&self, name: &str) -> Result<Vec<u8>, TrainError> {
        let (Some(info), Ok(at)) = (self.file.info(name), self.names.binary_search_by(|n| n.as_str().cmp(name))) else {
            return Err(damaged(self.path(), name, "expected this tensor, got nothing"));
        };
        let (dtype, bytes) = self.file.read_stored(name)?;
        let (want, got) = (&self.sums[32 * at..32 * at + 32], digest(name, dtype, &info.shape, &bytes));
        if *want != got {
            return Err(damaged(
                self.path(),
                name,
                format!("damaged: expected SHA-256 {}, got {}", hex_of(want), hex_of(&got)),
            ));
        }
        Ok(bytes)
    }

    /// The values of a tensor of f32.
    ///
    /// # Errors
    /// As [`Sealed::read`].
    pub(super) fn read_f32(&self, name: &str) -> Result<Vec<f32>, TrainError> {
        Ok(self.read(name)?.as_chunks::<4>().0.iter().map(|&b| f32::from_le_bytes(b)).collect())
    }

    /// What is no tensor.
    ///
    /// # Errors
    /// As [`Sealed::read`], and for another kind of file.
    pub(super) fn about<T: serde::de::DeserializeOwned>(&self) -> Result<T, TrainError> {
        self.json(ABOUT)
    }

    fn json<T: serde::de::DeserializeOwned>(&self, name: &str) -> Result<T, TrainError> {
        let text = self.read(name)?;
        serde_json::from_slice(&text).map_err(|e| damaged(self.path(), name, format!("not of this journal: {e}")))
    }

    /// Reads everything.
    ///
    /// # Errors
    /// As [`Sealed::read`].
    pub(super) fn verify(&self) -> Result<(), TrainError> {
        self.names.iter().try_for_each(|name| self.read(name).map(|_| ()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_file_is_not_another_one_nor_of_another_run() {
        let dir = tempfile::tempdir().unwrap();
        let (a, b) = (dir.path().join("block-00000.safetensors"), dir.path().join("block-00001.safetensors"));
        let run = |epochs: u32| json!({"dsq": "1", "options": {"--epochs": epochs}});
        write(&a, &run(2), vec![], &1).unwrap();
        assert_eq!(Sealed::open(&a, &run(2)).unwrap().about::<u32>().unwrap(), 1);
        std::fs::copy(&a, &b).unwrap();
        for (path, run, words) in [
            (&b, run(2), "file: expected what was written as block-00001.safetensors, got block-00000.safetensors"),
            (&a, run(3), "of another run: options.--epochs: expected 3 as in the run, got 2"),
        ] {
            let e = Sealed::open(path, &run).unwrap_err();
            assert!(e.exit_code() == 3 && e.to_string().ends_with(words), "{e}");
        }
    }

    #[test]
    fn no_changed_byte_passes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.safetensors");
        let data = vec![1.5, -0.0, f32::NAN, f32::MIN_POSITIVE / 2.0];
        let i32s = TensorData::I32 { shape: vec![3], data: vec![1, -2, 3] };
        let tensors =
            || vec![floats("b".into(), vec![2, 2], data.clone()), NamedTensor { name: "a".into(), data: i32s.clone() }];
        let run = json!({"options": {"--epochs": 2}});
        write(&path, &run, tensors(), &vec!["one", "two"]).unwrap();
        let open = || Sealed::open(&path, &run).and_then(|f| f.verify().map(|()| f));
        let read = |f: &Sealed| {
            let bits: Vec<u32> = f.read_f32("b").unwrap().into_iter().map(f32::to_bits).collect();
            (bits, f.read("a").unwrap(), f.about::<Vec<String>>().unwrap(), f.shape("b"))
        };
        let want = read(&open().unwrap());
        assert_eq!(want.0, data.iter().map(|v| v.to_bits()).collect::<Vec<_>>());
        assert_eq!((&want.2[..], &want.3), (&["one".to_owned(), "two".to_owned()][..], &Some(vec![2, 2])));
        let whole = std::fs::read(&path).unwrap();
        let mut refused = 0;
        for at in 0..whole.len() {
            for bit in 0..8 {
                let mut bytes = whole.clone();
                bytes[at] ^= 1 << bit;
                std::fs::write(&path, &bytes).unwrap();
                match open() {
                    // Blanks of the header may become other blanks: nothing that is read changed.
                    Ok(f) => assert!(read(&f) == want, "byte {at}, bit {bit}"),
                    Err(e) => {
                        refused += 1;
                        assert!(e.exit_code() == 3 && e.to_string().contains("x.safetensors"), "{e}");
                    }
                }
            }
        }
        assert!(refused > 8 * whole.len() - 200, "{refused} of {}", 8 * whole.len());
        for len in 0..whole.len() {
            std::fs::write(&path, &whole[..len]).unwrap();
            assert_eq!(open().unwrap_err().exit_code(), 3, "{len} bytes");
        }
        std::fs::write(&path, [&whole[..], b"x"].concat()).unwrap();
        assert_eq!(open().unwrap_err().exit_code(), 3);
    }
}
