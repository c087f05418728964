//! Links liblayerzero: that of LAYERZERO_LIB_DIR, else one that is built here from the C source beside this crate.

use std::env;
use std::path::PathBuf;
use std::process::Command;

fn main() {
    println!("cargo:rerun-if-env-changed=LAYERZERO_LIB_DIR");
    let folder = match env::var_os("LAYERZERO_LIB_DIR") {
        Some(folder) => PathBuf::from(folder),
        None => built(),
    };
    println!("cargo:rustc-link-search=native={}", folder.display());
    println!("cargo:rustc-link-lib=static=layerzero");
    for library in ["dl", "m", "pthread"] {
        println!("cargo:rustc-link-lib={library}");
    }
}

fn built() -> PathBuf {
    let here = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it"));
    let library = here.parent().expect("the crate lies in the folder of the C library");
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    println!("cargo:rerun-if-changed={}", library.join("src").display());
    println!("cargo:rerun-if-changed={}", library.join("layerzero.h").display());
    for shared in ["ipc/shm", "client/session"] {
        // headers that the client in Python has, too
        println!("cargo:rerun-if-changed={}", library.join("../src/layerzero").join(shared).display());
    }
    let made = Command::new("make")
        .env_remove("MAKEFLAGS")
        .arg("-C")
        .arg(library)
        .arg(format!("BUILD={}", out.display()))
        .arg(format!("-j{}", env::var("NUM_JOBS").expect("cargo sets it")))
        .arg(out.join("liblayerzero.a"))
        .status();
    match made {
        Ok(status) if status.success() => out,
        other => panic!(
            "install make and a C compiler, or name a folder with liblayerzero.a in LAYERZERO_LIB_DIR: {other:?}"
        ),
    }
}
