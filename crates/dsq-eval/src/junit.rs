//! Checks as a JUnit XML file, which CI systems read. Not a verdict: a check that fails here is one that [`crate::Verdict::fails`].
//!
//! The form is the one that Jenkins, GitLab and GitHub's reporters share: `testsuites` holds a `testsuite` for each job, which holds a
//! `testcase` for each check, with `failure` or `skipped` inside where it is no pass.

use crate::{Check, Verdict};
use std::fmt::Write;

/// The checks of `suite`, job by job in their order.
pub fn junit(suite: &str, checks: &[Check]) -> String {
    let count = |checks: &[&Check]| {
        let of = |wanted: fn(&Verdict) -> bool| checks.iter().filter(|c| wanted(&c.verdict)).count();
        let failures = of(|v| v.fails());
        let skipped = of(|v| *v == Verdict::NotComparable);
        format!("tests=\"{}\" failures=\"{failures}\" errors=\"0\" skipped=\"{skipped}\"", checks.len())
    };
    let all: Vec<&Check> = checks.iter().collect();
    let mut out = String::from("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n");
    // Writing to a text cannot fail.
    let _ = writeln!(out, "<testsuites name=\"dsq regress {}\" {}>", escape(suite), count(&all));
    let mut jobs: Vec<&str> = Vec::new();
    for check in checks {
        if !jobs.contains(&check.recipe.as_str()) {
            jobs.push(&check.recipe);
        }
    }
    for job in jobs {
        let of_job: Vec<&Check> = checks.iter().filter(|c| c.recipe == job).collect();
        let _ = writeln!(out, "  <testsuite name=\"{}\" {}>", escape(job), count(&of_job));
        for c in of_job {
            let class = format!("{}.{}", escape(job), escape(&c.row));
            let _ = write!(out, "    <testcase classname=\"{class}\" name=\"{}\"", escape(&c.metric));
            let told = format!(
                "{}: baseline {}, measured {}, tolerance {}: {}",
                c.verdict.name(),
                c.baseline,
                c.measured,
                c.tolerance,
                c.note
            );
            let told = escape(&told);
            let _ = match c.verdict {
                v if v.fails() => {
                    writeln!(out, ">\n      <failure type=\"{}\" message=\"{told}\"/>\n    </testcase>", v.name())
                }
                Verdict::NotComparable => writeln!(out, ">\n      <skipped message=\"{told}\"/>\n    </testcase>"),
                _ => writeln!(out, "/>"),
            };
        }
        out += "  </testsuite>\n";
    }
    out + "</testsuites>\n"
}

/// Text as the value of an attribute. What XML 1.0 cannot hold at all becomes `?`.
fn escape(text: &str) -> String {
    let mut out = String::new();
    for c in text.chars() {
        match c {
            '&' => out += "&amp;",
            '<' => out += "&lt;",
            '>' => out += "&gt;",
            '"' => out += "&quot;",
            '\t' | '\n' | '\r' => {
                let _ = write!(out, "&#{};", c as u32);
            }
            '\0'..='\u{1f}' | '\u{fffe}' | '\u{ffff}' => out.push('?'),
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Tolerance;
    use serde_json::Value;

    #[test]
    fn failures_and_skips_are_told_and_text_is_escaped() {
        let check = |recipe: &str, verdict, note: &str| Check {
            recipe: recipe.into(),
            row: "exported".into(),
            metric: "perplexity".into(),
            baseline: Value::from(1.5),
            measured: Value::Null,
            tolerance: Tolerance::Relative(0.02),
            verdict,
            note: note.into(),
        };
        let checks = [
            check("a", Verdict::Pass, ""),
            check("b<c", Verdict::Regressed, "\"x\" & \u{1}\n<y>"),
            check("a", Verdict::NotComparable, "elsewhere"),
            check("a", Verdict::BaseMoved, ""),
        ];
        let want = r#"<?xml version="1.0" encoding="UTF-8"?>
<testsuites name="dsq regress quick" tests="4" failures="2" errors="0" skipped="1">
  <testsuite name="a" tests="3" failures="1" errors="0" skipped="1">
    <testcase classname="a.exported" name="perplexity"/>
    <testcase classname="a.exported" name="perplexity">
      <skipped message="not comparable: baseline 1.5, measured null, tolerance 2% worse: elsewhere"/>
    </testcase>
    <testcase classname="a.exported" name="perplexity">
      <failure type="base moved" message="base moved: baseline 1.5, measured null, tolerance 2% worse: "/>
    </testcase>
  </testsuite>
  <testsuite name="b&lt;c" tests="1" failures="1" errors="0" skipped="0">
    <testcase classname="b&lt;c.exported" name="perplexity">
      <failure type="regressed" message="regressed: baseline 1.5, measured null, tolerance 2% worse: &quot;x&quot; &amp; ?&#10;&lt;y&gt;"/>
    </testcase>
  </testsuite>
</testsuites>
"#;
        assert_eq!(junit("quick", &checks), want);
    }
}
