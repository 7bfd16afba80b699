//! Links the library of kvq: the folder KVQ_LIB_DIR, else what pkg-config says of kvq, else where the linker looks.
//! KVQ_LIB_KIND: dylib (default) or static.
use std::{env, process::Command};

fn main() {
    println!("cargo:rerun-if-env-changed=KVQ_LIB_DIR");
    println!("cargo:rerun-if-env-changed=KVQ_LIB_KIND");
    let kind = env::var("KVQ_LIB_KIND").unwrap_or_else(|_| "dylib".into());
    if kind != "dylib" && kind != "static" {
        panic!("KVQ_LIB_KIND is {}, neither dylib nor static", kind);
    }
    if let Ok(folder) = env::var("KVQ_LIB_DIR") {
        println!("cargo:rustc-link-search=native={}", folder);
    } else if let Ok(said) = Command::new("pkg-config").args(["--libs-only-L", "kvq"]).output() {
        for folder in String::from_utf8_lossy(&said.stdout)
            .split_whitespace()
            .filter_map(|f| f.strip_prefix("-L"))
        {
            println!("cargo:rustc-link-search=native={}", folder);
        }
    }
    println!("cargo:rustc-link-lib={}=kvq", kind);
    if kind == "static" {
        println!("cargo:rustc-link-lib=dylib=stdc++");
    }
}
