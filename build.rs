//! Links the BLAS that the feature `blas` asks for; does nothing otherwise.

fn main() {
    println!("cargo:rerun-if-env-changed=ATP_BLAS");
    if std::env::var_os("CARGO_FEATURE_BLAS").is_some() {
        let library = std::env::var("ATP_BLAS").unwrap_or_else(|_| "openblas".into());
        println!("cargo:rustc-link-lib={library}");
    }
}
