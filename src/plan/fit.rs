//! Least squares without negative coefficients.

/// The coefficients `c ≥ 0` that make `Σ_j c_j · rows[i][j]` come closest to `targets[i]`, relative to each target.
///
/// By coordinate descent, which converges for this convex problem: each step minimises over one coefficient.
pub(crate) fn non_negative<const N: usize>(rows: &[[f64; N]], targets: &[f64]) -> [f64; N] {
    // Relative errors count; columns are scaled to like size, so that a few hundred rounds are plenty.
    let rows: Vec<[f64; N]> = rows.iter().zip(targets).map(|(row, target)| row.map(|value| value / target)).collect();
    let mut scale = [0.0f64; N];
    for row in &rows {
        (0..N).for_each(|j| scale[j] = scale[j].max(row[j].abs()));
    }
    let scaled: Vec<[f64; N]> =
        rows.iter().map(|row| std::array::from_fn(|j| if scale[j] > 0.0 { row[j] / scale[j] } else { 0.0 })).collect();
    let mut coefficients = [0.0; N];
    for _ in 0..5000 {
        for j in 0..N {
            let (mut above, mut below) = (0.0, 0.0);
            for row in &scaled {
                let others: f64 = (0..N).filter(|k| *k != j).map(|k| row[k] * coefficients[k]).sum();
                above += row[j] * (1.0 - others);
                below += row[j] * row[j];
            }
            coefficients[j] = if below > 0.0 { (above / below).max(0.0) } else { 0.0 };
        }
    }
    std::array::from_fn(|j| if scale[j] > 0.0 { coefficients[j] / scale[j] } else { 0.0 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_finds_the_coefficients_of_exact_data() {
        let truth = [1e-6, 3e-9, 0.0];
        let rows: Vec<[f64; 3]> = (1..9).map(|i| [1.0, (i * i * 1000) as f64, (i * 77 % 5) as f64]).collect();
        let targets: Vec<f64> = rows.iter().map(|row| row.iter().zip(truth).map(|(x, c)| x * c).sum()).collect();
        for (got, want) in non_negative(&rows, &targets).iter().zip(truth) {
            assert!((got - want).abs() <= 1e-3 * want.max(1e-9), "{got} {want}");
        }
    }

    #[test]
    fn it_never_returns_a_negative_coefficient() {
        // The best line has a negative intercept.
        let rows: Vec<[f64; 2]> = (1..9).map(|i| [1.0, i as f64]).collect();
        let targets: Vec<f64> = (1..9).map(|i| i as f64 * 2.0 - 1.0).collect();
        let got = non_negative(&rows, &targets);
        assert!(got[0] == 0.0 && got[1] > 1.5, "{got:?}");
    }
}
