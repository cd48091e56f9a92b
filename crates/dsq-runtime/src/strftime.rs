//! Today's date for chat templates, which put it into the system message (`strftime_now`). In UTC: the product knows no time
//! zones. Not a clock for anything else.

use minijinja::{Error, ErrorKind};
use std::time::{SystemTime, UNIX_EPOCH};

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];

/// The time now in the words of Python's `strftime`.
///
/// # Errors
/// An error of the template for a directive that is not known.
pub(crate) fn strftime_now(format: &str) -> Result<String, Error> {
    strftime(format, SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs()))
}

/// `seconds` since 1970, UTC.
fn strftime(format: &str, seconds: u64) -> Result<String, Error> {
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    let (year, month, day) = civil(days);
    let (month_name, day_name) = (MONTHS[month as usize - 1], DAYS[(days % 7) as usize]);
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let directive = chars.next();
        out.push_str(&match directive {
            Some('Y') => year.to_string(),
            Some('y') => format!("{:02}", year % 100),
            Some('m') => format!("{month:02}"),
            Some('d') => format!("{day:02}"),
            Some('B') => month_name.into(),
            Some('b') => month_name[..3].into(),
            Some('A') => day_name.into(),
            Some('a') => day_name[..3].into(),
            Some('H') => format!("{:02}", second / 3600),
            Some('M') => format!("{:02}", second / 60 % 60),
            Some('S') => format!("{:02}", second % 60),
            Some('%') => "%".into(),
            other => {
                let got = other.map_or("none".into(), |c| format!("%{c}"));
                let problem = format!("strftime_now: expected one of %Y %y %m %d %B %b %A %a %H %M %S %%, got {got}");
                return Err(Error::new(ErrorKind::InvalidOperation, problem));
            }
        });
    }
    Ok(out)
}

/// Year, month and day, `days` after 1970-01-01 in the Gregorian calendar: years are counted off, then months.
fn civil(mut days: u64) -> (u64, u64, u64) {
    let leap = |y: u64| y.is_multiple_of(4) && (!y.is_multiple_of(100) || y.is_multiple_of(400));
    let mut year = 1970;
    while days >= 365 + u64::from(leap(year)) {
        days -= 365 + u64::from(leap(year));
        year += 1;
    }
    let lengths = [31, 28 + u64::from(leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let mut month = 0;
    while days >= lengths[month] {
        days -= lengths[month];
        month += 1;
    }
    (year, month as u64 + 1, days + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Expected texts: `date -u -d @N`.
    #[test]
    fn dates_are_those_of_the_calendar() {
        let format = "%A %a, %d %B %b %Y %y %m %H:%M:%S %%";
        for (seconds, want) in [
            (0, "Thursday Thu, 01 January Jan 1970 70 01 00:00:00 %"),
            (951_782_399, "Monday Mon, 28 February Feb 2000 00 02 23:59:59 %"),
            (951_782_400, "Tuesday Tue, 29 February Feb 2000 00 02 00:00:00 %"),
            (1_735_689_599, "Tuesday Tue, 31 December Dec 2024 24 12 23:59:59 %"),
            (4_107_542_400, "Monday Mon, 01 March Mar 2100 00 03 00:00:00 %"),
        ] {
            assert_eq!(strftime(format, seconds).unwrap(), want);
        }
        assert!(strftime("%Q", 0).is_err() && strftime("%", 0).is_err());
    }
}
