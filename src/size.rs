//! A number of bytes as a person writes it: `5GB`, `300 MiB`, `4096`. Not a file's size on a disk.

/// Bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size(pub u64);

impl std::str::FromStr for Size {
    type Err = String;

    /// A positive number, perhaps with a fraction, and a unit: B (or nothing), KB, MB, GB, TB (powers of 1000), KiB, MiB, GiB,
    /// TiB (powers of 1024).
    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("expected a size such as 5GB or 300MiB, got {text:?}");
        let at = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        let unit = text[at..].trim().to_ascii_uppercase();
        let (base, power) = match unit.as_str() {
            "" | "B" => (1000f64, 0),
            "KB" | "MB" | "GB" | "TB" => (1000.0, "KMGT".find(&unit[..1]).map_or(0, |i| i + 1)),
            "KIB" | "MIB" | "GIB" | "TIB" => (1024.0, "KMGT".find(&unit[..1]).map_or(0, |i| i + 1)),
            _ => return Err(wrong()),
        };
        let number: f64 = text[..at].parse().map_err(|_| wrong())?;
        let bytes = number * base.powi(power as i32);
        if !(1.0..=1e18).contains(&bytes) {
            return Err(wrong());
        }
        Ok(Self(bytes as u64))
    }
}

/// Bytes for a person: `3.50 GB`.
pub fn shown(bytes: u64) -> String {
    let units = [("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)];
    let unit = units.into_iter().find(|(_, size)| bytes as f64 >= *size);
    unit.map_or(format!("{bytes} bytes"), |(name, size)| format!("{:.2} {name}", bytes as f64 / size))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_with_their_units() {
        let good = [("5GB", 5_000_000_000), ("300 MiB", 300 << 20), ("1.5kb", 1500), ("7", 7), ("2TiB", 2 << 40)];
        for (text, bytes) in good {
            assert_eq!(text.parse(), Ok(Size(bytes)), "{text}");
        }
        for text in ["", "GB", "0", "-1GB", "5 PB", "1e9", "5GBs", "1.2.3MB", "0.1", "9999999TB"] {
            let e = text.parse::<Size>().unwrap_err();
            assert!(e.contains(&format!("{text:?}")), "{e}");
        }
        assert_eq!(shown(3_500_000_000), "3.50 GB");
        assert_eq!(shown(12), "12 bytes");
    }
}
