//! Compiles the kernels of `kernels/*.cu` for the host.

fn main() {
    for path in ["shim", "../kernels"] {
        println!("cargo:rerun-if-changed={path}");
    }
    cc::Build::new()
        .cpp(true)
        .std("c++17")
        .opt_level(2)
        // A product and a sum are rounded as written: what a card does is checked against a float64 reference, not against this.
        .flag("-ffp-contract=off")
        .file("shim/kernels.cpp")
        .compile("cuda_sim_kernels");
}
