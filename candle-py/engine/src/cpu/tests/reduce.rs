//! Reductions over a row against float64, wherever in the row a number is.

use super::{assert_close, every_kernels, random};

#[test]
fn the_greatest_is_found_in_every_place_and_no_nan_is() {
    for kernels in every_kernels() {
        assert_eq!(kernels.greatest(&[]), f32::NEG_INFINITY);
        for count in [1, 3, 15, 16, 17, 63, 64, 65, 130, 200] {
            for place in 0..count {
                let mut row = random(count, 6);
                row[place] = 1.5;
                row[(place + 1) % count] = if count > 1 { f32::NAN } else { 1.5 };
                assert_eq!(kernels.greatest(&row), 1.5, "{:?} {count} {place}", kernels.isa());
            }
        }
    }
}

#[test]
fn sums_of_powers_match_float64_leave_out_the_least_and_show_nan() {
    for kernels in every_kernels() {
        let what = format!("{:?}", kernels.isa());
        for (count, scale) in [(0, 1.0), (1, 1.0), (17, 30.0), (130, 60.0), (1024, 5.0)] {
            let row: Vec<f32> = random(count, 5).iter().map(|value| value * scale).collect();
            let greatest = kernels.greatest(&row).max(-scale);
            let sum: f64 = row.iter().map(|value| f64::from(value - greatest).exp()).sum();
            assert_close(&[kernels.power_sum(&row, greatest)], &[sum], 1e-6, &what);
        }
        assert_eq!(kernels.power_sum(&[3.0, -82.5, f32::NEG_INFINITY, -500.0], 3.0), 1.0);
        assert!(kernels.power_sum(&[-82.5, -1e30], 3.0) == 0.0 && kernels.power_sum(&[-81.5], 3.0) > 0.0, "{what}");
        for place in 0..70 {
            let mut row = random(70, 7);
            row[place] = f32::NAN;
            assert!(kernels.power_sum(&row, 1.0).is_nan() && kernels.log_sum_exp(&row).is_nan(), "{what} {place}");
        }
    }
}

#[test]
fn the_logarithm_of_a_sum_of_exponentials_matches_float64() {
    for kernels in every_kernels() {
        for (count, scale) in [(1, 1.0), (17, 30.0), (384, 5.0), (50_000, 80.0)] {
            let row: Vec<f32> = random(count, 5).iter().map(|value| value * scale).collect();
            let most = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let sum: f64 = row.iter().map(|value| f64::from(value - most).exp()).sum();
            let found = kernels.log_sum_exp(&row);
            assert_close(&[found], &[f64::from(most) + sum.ln()], 2e-6, &format!("{:?} {count}", kernels.isa()));
        }
    }
}
