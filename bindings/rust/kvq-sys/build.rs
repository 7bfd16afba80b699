//! Links the library of kvq: the one in the folder KVQ_LIB_DIR, else one of this crate's version that pkg-config knows, else, in a packaged
//! crate, one that CMake builds from `sources`, with the formats of KVQ_LIBRARY_FORMATS; else where the linker looks.
//! KVQ_LIB_KIND: dylib (default) or static, which a built library is.
use std::{env, path::Path, process::Command};

fn search(folder: &str) {
    println!("cargo:rustc-link-search=native={}", folder);
}

fn run(command: &mut Command) {
    let status = command.status();
    if !matches!(&status, Ok(s) if s.success()) {
        panic!("{:?}: {:?}", command, status);
    }
}

/// Builds the static library: its folder.
fn build(sources: &Path) -> String {
    let folder = env::var("OUT_DIR").unwrap() + "/library";
    let formats = env::var("KVQ_LIBRARY_FORMATS").unwrap_or_else(|_| "all".into());
    let mut configure = Command::new("cmake");
    configure.arg("-S").arg(sources).args(["-B", &folder]);
    let kind = env::var("CMAKE_BUILD_TYPE").unwrap_or_else(|_| "Release".into());
    configure
        .arg(format!("-DCMAKE_BUILD_TYPE={}", kind))
        .arg("-DKVQ_LIBRARY=ON");
    for option in ["TESTS", "EXAMPLES", "BENCH", "INSTALL"] {
        configure.arg(format!("-DKVQ_{}=OFF", option));
    }
    run(configure.arg(format!("-DKVQ_LIBRARY_FORMATS={}", formats)));
    let jobs = env::var("NUM_JOBS").unwrap_or_else(|_| "1".into());
    run(Command::new("cmake").args(["--build", &folder, "--target", "kvq_library", "--parallel", &jobs]));
    folder + "/src"
}

/// Folders of a library that pkg-config knows, of this crate's version or a later one that serves it.
fn known() -> Option<Vec<String>> {
    let part = |name| env::var(format!("CARGO_PKG_VERSION_{}", name)).unwrap();
    let (major, minor, patch) = (part("MAJOR"), part("MINOR"), part("PATCH"));
    let next = minor.parse::<u32>().unwrap() + 1;
    let least = format!("kvq >= {}.{}.{}", major, minor, patch);
    let said = Command::new("pkg-config")
        .args(["--libs", &least, &format!("kvq < {}.{}", major, next)])
        .output()
        .ok()?;
    let flags = String::from_utf8_lossy(&said.stdout).into_owned();
    // Headers may be installed without a library.
    if !said.status.success() || !flags.split_whitespace().any(|f| f == "-lkvq") {
        return None;
    }
    let folders = flags.split_whitespace().filter_map(|f| f.strip_prefix("-L"));
    Some(folders.map(String::from).collect())
}

fn main() {
    for name in ["KVQ_LIB_DIR", "KVQ_LIB_KIND", "KVQ_LIBRARY_FORMATS"] {
        println!("cargo:rerun-if-env-changed={}", name);
    }
    let mut kind = env::var("KVQ_LIB_KIND").unwrap_or_else(|_| "dylib".into());
    if kind != "dylib" && kind != "static" {
        panic!("KVQ_LIB_KIND is {}, neither dylib nor static", kind);
    }
    let sources = Path::new("sources");
    if let Ok(folder) = env::var("KVQ_LIB_DIR") {
        search(&folder);
    } else if let Some(folders) = known() {
        folders.iter().for_each(|folder| search(folder));
    } else if sources.exists() {
        search(&build(sources));
        kind = "static".into();
    }
    println!("cargo:rustc-link-lib={}=kvq", kind);
    if kind == "static" {
        println!("cargo:rustc-link-lib=dylib=stdc++");
    }
}
