//! `dsq report`: reports of `dsq eval`, `train`, `bench` and `regress` (their `--out`, `--report` or `report.json`) put together for people, as
//! Markdown and as one page of HTML that needs nothing else. It measures nothing.

use crate::plot::{Series, curves};
use crate::{Global, error::CliError, input, output};
use dsq_checkpoint::{printable, write_atomic};
use dsq_eval::{Divergence, Report};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Metrics whose history is drawn, where two reports or more have them.
const HISTORY: [&str; 6] = ["perplexity", "kl", "top1_agreement", "top1", "accuracy", "bits_per_byte"];
/// Metrics that are drawn over the bits of a weight.
const AGAINST_BITS: [&str; 4] = ["kl", "perplexity", "accuracy", "top1"];

/// Options of `dsq report`.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Reports, oldest first: a history is drawn in this order.
    #[arg(value_name = "REPORT.json", required = true)]
    reports: Vec<PathBuf>,
    /// Write one page with tables and plots.
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Write the tables.
    #[arg(long, value_name = "FILE")]
    markdown: Option<PathBuf>,
}

/// A report and what it is called in pictures.
struct Named {
    name: String,
    report: Report,
}

/// Runs the command.
pub fn run(args: Args, global: &Global) -> Result<u8, CliError> {
    let reports = args.reports.iter().map(|path| read(path)).collect::<Result<Vec<_>, _>>()?;
    if let Some(file) = &args.markdown {
        write_atomic(file, markdown(&reports).as_bytes())?;
    }
    if let Some(file) = &args.html {
        write_atomic(file, html(&reports).as_bytes())?;
    }
    if global.json {
        let all: Vec<&Report> = reports.iter().map(|r| &r.report).collect();
        output::line(serde_json::json!({ "reports": all }).to_string());
    } else if args.html.is_none() && args.markdown.is_none() {
        for r in &reports {
            output::line(format!("{}\n{}\n", r.name, r.report.table()));
        }
    }
    Ok(0)
}

/// One page of HTML with the tables of these reports, under these names, and all plots that they have numbers for.
pub fn page(reports: Vec<(String, Report)>) -> String {
    let named: Vec<Named> =
        reports.into_iter().map(|(name, report)| Named { name: printable(&name), report }).collect();
    html(&named)
}

fn read(path: &Path) -> Result<Named, CliError> {
    let at = printable(&path.to_string_lossy());
    let report: Report = serde_json::from_slice(&input::bytes(path)?)
        .map_err(|e| CliError::new(3, format!("{at}: expected a report of dsq (--out, --report): {e}")))?;
    if report.format != dsq_eval::REPORT_FORMAT {
        let problem = format!("format: expected {}, got {}", dsq_eval::REPORT_FORMAT, report.format);
        return Err(CliError::new(3, format!("{at}: {problem}")));
    }
    // What was measured, else the file.
    let model = ["model", "recipe", "suite"].iter().find_map(|key| report.about.get(*key)?.as_str());
    let last = |text: &str| Path::new(text).file_name().map_or(text.to_owned(), |n| n.to_string_lossy().into_owned());
    let name = format!("{} ({} {})", last(model.unwrap_or(&at)), report.command, report.dsq);
    Ok(Named { name: printable(&name), report })
}

/// What names a measurement, on a line; lists are left out.
fn about(report: &Report) -> String {
    let short = report.about.iter().filter(|(_, v)| v.is_string() || v.is_number() || v.is_boolean());
    let text = |v: &serde_json::Value| v.as_str().map_or_else(|| v.to_string(), str::to_owned);
    short.map(|(key, v)| format!("{key}: {}", printable(&text(v)))).collect::<Vec<_>>().join(", ")
}

fn markdown(reports: &[Named]) -> String {
    // A bar would end a cell, and a sign of HTML begin a tag.
    let cell = |text: &String| escape(&text.replace('\\', "\\\\").replace('|', "\\|").replace('\n', " "));
    let mut out = String::from("# Report of dsq\n");
    for r in reports {
        out += &format!("\n## {}\n\n{}\n\n", cell(&r.name), cell(&about(&r.report)));
        for (i, row) in r.report.cells().iter().enumerate() {
            out += &format!("| {} |\n", row.iter().map(cell).collect::<Vec<_>>().join(" | "));
            if i == 0 {
                out += &format!("|{}\n", "---|".repeat(row.len()));
            }
        }
    }
    out
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;").replace('\'', "&#39;")
}

fn html(reports: &[Named]) -> String {
    let mut out = String::from(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>Report of dsq</title>\n<style>\nbody { font: 15px/1.5 \
         sans-serif; margin: 2em auto; max-width: 70em; padding: 0 1em; color: #222 }\ntable { border-collapse: collapse; margin: 1em 0 \
         }\nth, td { border-bottom: 1px solid #ddd; padding: .3em .8em; text-align: right; font-variant-numeric: tabular-nums \
         }\nth:first-child, td:first-child { text-align: left }\nsvg { max-width: 100%; height: auto; margin: 1em 0 }\np { color: #555 \
         }\n</style></head><body>\n<h1>Report of dsq</h1>\n",
    );
    for svg in pictures(reports) {
        out += &format!("<div>{svg}</div>\n");
    }
    for r in reports {
        out += &format!("<h2>{}</h2>\n<p>{}</p>\n<table>\n", escape(&r.name), escape(&about(&r.report)));
        for (i, row) in r.report.cells().iter().enumerate() {
            let tag = if i == 0 { "th" } else { "td" };
            let cells: String = row.iter().map(|c| format!("<{tag}>{}</{tag}>", escape(c))).collect();
            out += &format!("<tr>{cells}</tr>\n");
        }
        out += "</table>\n";
    }
    out + "</body></html>\n"
}

/// The plots that the reports have numbers for.
fn pictures(reports: &[Named]) -> Vec<String> {
    let all = AGAINST_BITS.iter().filter_map(|metric| against_bits(reports, metric));
    all.chain(divergences(reports))
        .chain(layers(reports))
        .chain(HISTORY.iter().filter_map(|m| history(reports, m)))
        .chain(versions(reports))
        .collect()
}

/// A metric over the bits of a weight: a dot for each model, of two or more.
fn against_bits(reports: &[Named], metric: &str) -> Option<String> {
    let mut dots = Vec::new();
    for r in reports {
        let rows: Vec<_> = r.report.rows.iter().filter(|row| !row.metrics.contains_key("version")).collect();
        let all: Vec<_> =
            rows.iter().filter_map(|row| Some((row, row.get("bits_per_weight")?, row.get(metric)?))).collect();
        for (row, bits, value) in &all {
            let name = if all.len() == 1 { r.name.clone() } else { format!("{} {}", r.name, row.name) };
            dots.push(Series { name, points: vec![(*bits, *value)], dots: true });
        }
    }
    if dots.len() < 2 {
        return None;
    }
    curves(&format!("{metric} over bits per weight"), ["bits per weight", metric], &dots)
}

/// The share of predictions in each bin of KL.
fn divergences(reports: &[Named]) -> Option<String> {
    let line = |name: String, counts: &serde_json::Value| {
        let counts: Vec<f64> = counts.as_array()?.iter().filter_map(|c| c.as_f64()).collect();
        let all: f64 = counts.iter().sum();
        if counts.len() != Divergence::BINS || all <= 0.0 {
            return None;
        }
        let points = counts.iter().enumerate().map(|(i, c)| (Divergence::bin(i).log10(), 100.0 * c / all)).collect();
        Some(Series::line(&name, points))
    };
    let mut lines = Vec::new();
    for r in reports {
        lines.extend(r.report.about.get("kl_histogram").and_then(|counts| line(r.name.clone(), counts)));
        // Of several models in one report.
        let several = r.report.about.get("kl_histograms").and_then(|v| v.as_array());
        for one in several.into_iter().flatten() {
            lines.extend(line(format!("{} {}", r.name, one["row"].as_str().unwrap_or("")), &one["kl_histogram"]));
        }
    }
    curves("KL divergence of the predictions", ["log10 of KL in nats", "% of predictions"], &lines)
}

/// The difference to the float model of each row over the versions of dsq, of a history as `dsq regress` writes it.
fn versions(reports: &[Named]) -> Option<String> {
    let mut names: Vec<&str> = Vec::new();
    let mut rows: BTreeMap<&str, Vec<(f64, f64)>> = BTreeMap::new();
    for row in reports.iter().flat_map(|r| &r.report.rows) {
        let version = row.metrics.get("version").and_then(|v| v.as_str());
        let (Some(version), Some(difference)) = (version, row.get("difference")) else { continue };
        let at = names.iter().position(|n| *n == version).unwrap_or_else(|| {
            names.push(version);
            names.len() - 1
        });
        rows.entry(&row.name).or_default().push((at as f64 + 1.0, difference));
    }
    rows.retain(|_, points| points.len() > 1);
    let lines: Vec<Series> = rows.into_iter().map(|(name, points)| Series::line(name, points)).collect();
    let axis = names.iter().enumerate().map(|(i, n)| format!("{} = {n}", i + 1)).collect::<Vec<_>>().join(", ");
    curves("difference to the float model", [&format!("version: {axis}"), "difference"], &lines)
}

/// The relative error of the weights of each layer.
fn layers(reports: &[Named]) -> Option<String> {
    let line = |r: &Named| {
        let errors: Vec<f64> =
            r.report.about.get("layer_errors")?.as_array()?.iter().filter_map(|e| e[1].as_f64()).collect();
        (!errors.is_empty())
            .then(|| Series::line(&r.name, errors.into_iter().enumerate().map(|(i, e)| (i as f64, e)).collect()))
    };
    let lines: Vec<Series> = reports.iter().filter_map(line).collect();
    curves("relative error of the weights", ["quantized layer, in the order of the proof", "relative error"], &lines)
}

/// A metric of each row over the reports that have it, with its interval where there is one.
fn history(reports: &[Named], metric: &str) -> Option<String> {
    let mut rows: BTreeMap<&str, Vec<(f64, f64)>> = BTreeMap::new();
    for (i, r) in reports.iter().enumerate() {
        for row in r.report.rows.iter().filter(|row| !row.metrics.contains_key("version")) {
            if let Some(value) = row.get(metric) {
                rows.entry(&row.name).or_default().push((i as f64 + 1.0, value));
            }
        }
    }
    rows.retain(|_, points| points.len() > 1);
    let lines: Vec<Series> = rows.into_iter().map(|(name, points)| Series::line(name, points)).collect();
    curves(&format!("history of {metric}"), ["report, in the order given", metric], &lines)
}

#[cfg(test)]
mod tests {
    use super::*;
    use dsq_eval::Row;

    fn named(name: &str, kl: f64, bits: f64) -> Named {
        let mut report = Report::new("eval").about("model", format!("models/{name}")).about("context", 8);
        let mut histogram = vec![0; Divergence::BINS];
        histogram[20] = 3;
        report =
            report.about("kl_histogram", histogram).about("layer_errors", serde_json::json!([["a", 0.1], ["b", 0.2]]));
        report.rows.push(Row::new("model").number("kl", kl).number("bits_per_weight", bits));
        Named { name: name.into(), report }
    }

    #[test]
    fn a_page_holds_tables_and_every_picture_and_nothing_of_others() {
        let reports = [named("w4 <b>", 0.1, 4.25), named("w8|x", 0.01, 8.25)];
        let page = html(&reports);
        for part in [
            "kl over bits per weight",
            "KL divergence of the predictions",
            "relative error of the weights",
            "history of kl",
        ] {
            assert!(page.contains(part), "{part}");
        }
        assert!(page.matches("<svg").count() == 4 && page.matches("<table>").count() == 2);
        assert!(page.contains("w4 &lt;b&gt;") && !page.contains("w4 <b>"));
        assert!(!page.contains("src=") && !page.contains("href=") && !page.contains("<script"), "nothing is fetched");
        let text = markdown(&reports);
        assert!(
            text.contains("## w8\\|x")
                && text.contains("## w4 &lt;b&gt;")
                && text.contains("| model | 0.010000 | 8.2500 |")
                && !text.contains("kl_histogram"),
            "{text}"
        );
        // Versions in one report.
        let mut history = Report::new("regress");
        for (version, difference) in [("0.1.0", 0.5), ("0.2.0", 0.4)] {
            history.rows.push(Row::new("m/w4").text("version", version).number("difference", difference));
        }
        let page = super::page(vec![("history".into(), history)]);
        assert!(page.contains("difference to the float model") && page.contains("1 = 0.1.0, 2 = 0.2.0"), "{page}");
        // One alone has no history and nothing to compare.
        assert_eq!(html(&reports[..1]).matches("<svg").count(), 2);
    }

    #[test]
    fn what_is_no_report_is_refused_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("r.json");
        for (text, problem) in [
            ("{}", "expected a report of dsq"),
            ("[", "expected a report of dsq"),
            (r#"{"format": 9, "dsq": "1", "command": "eval", "rows": []}"#, "format: expected 1, got 9"),
        ] {
            std::fs::write(&file, text).unwrap();
            let e = read(&file).err().unwrap();
            assert!(e.to_string().contains(problem) && e.to_string().contains("r.json") && e.code() == 3, "{e}");
        }
        assert_eq!(read(&dir.path().join("none")).err().unwrap().code(), 4);
    }
}
