//! Curves (the loss of a run, the speed of a model) as an SVG file. Not a plotting library: plotters draws.

use plotters::prelude::*;

/// One line of the picture.
pub struct Series {
    /// Its name in the legend.
    pub name: String,
    /// (x, y).
    pub points: Vec<(f64, f64)>,
    /// Whether they are dots, and no line.
    pub dots: bool,
}

impl Series {
    /// A line.
    pub fn line(name: impl Into<String>, points: Vec<(f64, f64)>) -> Self {
        Self { name: name.into(), points, dots: false }
    }
}

/// Draws losses over steps, as [`curves`].
pub fn loss_curve(title: &str, series: &[Series]) -> Option<String> {
    curves(title, ["step", "loss"], series)
}

/// Draws series over the axes `[x, y]` as SVG text. Non-finite points are left out; `None` when nothing is left to draw.
pub fn curves(title: &str, [x, y]: [&str; 2], series: &[Series]) -> Option<String> {
    let finite = |p: &&(f64, f64)| p.0.is_finite() && p.1.is_finite();
    let points: Vec<_> = series.iter().flat_map(|s| s.points.iter().filter(finite)).collect();
    let bounds = |f: fn(&(f64, f64)) -> f64| {
        points.iter().fold(None, |b: Option<(f64, f64)>, p| {
            let v = f(p);
            Some(b.map_or((v, v), |(lo, hi)| (lo.min(v), hi.max(v))))
        })
    };
    let ((x0, x1), (y0, y1)) = (bounds(|p| p.0)?, bounds(|p| p.1)?);
    let margin = ((y1 - y0) * 0.05).max(1e-3);
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, (900, 500)).into_drawing_area();
        area.fill(&WHITE).ok()?;
        let mut chart = ChartBuilder::on(&area)
            .caption(title, ("sans-serif", 20))
            .margin(12)
            .x_label_area_size(40)
            .y_label_area_size(56)
            .build_cartesian_2d(x0..x1.max(x0 + 1.0), y0 - margin..y1 + margin)
            .ok()?;
        chart.configure_mesh().x_desc(x).y_desc(y).draw().ok()?;
        for (i, s) in series.iter().enumerate() {
            let color = Palette99::pick(i).to_rgba();
            let points = s.points.iter().filter(finite).copied();
            let drawn = match s.dots {
                true => chart.draw_series(points.map(|p| Circle::new(p, 4, color.filled()))).ok()?,
                false => chart.draw_series(LineSeries::new(points, color.stroke_width(2))).ok()?,
            };
            drawn
                .label(s.name.clone())
                .legend(move |(x, y)| PathElement::new(vec![(x, y), (x + 18, y)], color.stroke_width(2)));
        }
        chart.configure_series_labels().background_style(WHITE.mix(0.8)).border_style(BLACK).draw().ok()?;
        area.present().ok()?;
    }
    Some(svg)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_every_series_and_leaves_out_what_is_not_finite() {
        let series = |name: &str, points: &[(f64, f64)]| Series::line(name, points.to_vec());
        let svg = loss_curve(
            "tiny",
            &[series("float", &[(0.0, 5.0), (1.0, f64::NAN), (2.0, 3.0)]), series("qat", &[(2.0, 3.1), (3.0, 3.0)])],
        )
        .unwrap();
        assert!(svg.starts_with("<svg") && svg.contains("float") && svg.contains("qat") && !svg.contains("NaN"));
        assert!(loss_curve("empty", &[series("float", &[(0.0, f64::NAN)])]).is_none());
    }
}
