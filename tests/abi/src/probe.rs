//! Asks the machine's C compiler what the headers mean: writes a program, runs it, reads its answers.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::{fs, io};

use crate::value::Value;

/// What to ask for.
#[derive(Debug, Default)]
pub struct Questions {
    /// Structures and their fields.
    pub structures: BTreeMap<String, Vec<String>>,
    /// Numbers.
    pub numbers: Vec<String>,
    /// Strings.
    pub texts: Vec<String>,
    /// Ioctls, whose structure's size is asked for too.
    pub ioctls: Vec<String>,
}

/// What the compiler says.
#[derive(Debug, Default)]
pub struct Answers {
    /// Size by structure.
    pub sizes: BTreeMap<String, usize>,
    /// Offset and size by structure and field.
    pub fields: BTreeMap<(String, String), (usize, usize)>,
    /// Value by macro.
    pub values: BTreeMap<String, Value>,
    /// `_IOC_SIZE` by ioctl.
    pub ioctl_sizes: BTreeMap<String, usize>,
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum ProbeError {
    /// A file could not be written or a program not started.
    #[error("Could not {action} {}; a C compiler called cc and the kernel's user headers are needed", path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// With which file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The compiler or the program failed.
    #[error("{what} failed:\n{said}")]
    Failed {
        /// Which of the two.
        what: &'static str,
        /// Its output.
        said: String,
    },
    /// The program said something unexpected.
    #[error("The probe answered a line that makes no sense: {line}")]
    Answer {
        /// The line.
        line: String,
    },
}

/// Compiles and runs a program over the two headers in `include`/linux, in `scratch`.
pub fn ask(include: &Path, scratch: &Path, questions: &Questions) -> Result<Answers, ProbeError> {
    let source = scratch.join("probe.c");
    let binary = scratch.join("probe");
    fs::write(&source, program(include, questions)).map_err(|source_error| ProbeError::Io {
        action: "write",
        path: source.clone(),
        source: source_error,
    })?;
    let mut compiler = Command::new("cc");
    compiler.args(["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-o"]).arg(&binary).arg(&source);
    run("The C compiler", &mut compiler)?;
    let output = run("The probe", &mut Command::new(&binary))?;
    let mut answers = Answers::default();
    for line in String::from_utf8_lossy(&output.stdout).lines() {
        answers.take(line).ok_or_else(|| ProbeError::Answer { line: line.to_owned() })?;
    }
    Ok(answers)
}

/// Compiles one header by itself, as a program that includes nothing else would.
pub fn compile_alone(header: &Path) -> Result<(), ProbeError> {
    let mut compiler = Command::new("cc");
    compiler.args(["-std=c99", "-pedantic", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", "-x", "c"]).arg(header);
    run("The C compiler", &mut compiler).map(|_| ())
}

fn run(what: &'static str, command: &mut Command) -> Result<Output, ProbeError> {
    let output = command.output().map_err(|source| ProbeError::Io {
        action: "run",
        path: command.get_program().into(),
        source,
    })?;
    if output.status.success() {
        return Ok(output);
    }
    Err(ProbeError::Failed { what, said: String::from_utf8_lossy(&output.stderr).into_owned() })
}

fn program(include: &Path, questions: &Questions) -> String {
    let mut c = String::from("#include <stddef.h>\n#include <stdio.h>\n#include <string.h>\n");
    for header in crate::HEADERS {
        let _ = writeln!(c, "#include \"{}\"", include.join("linux").join(header).display());
    }
    c.push_str("int main(void)\n{\n");
    for (structure, fields) in &questions.structures {
        let _ = writeln!(c, "printf(\"struct {structure} %zu\\n\", sizeof(struct {structure}));");
        for field in fields {
            let _ = writeln!(
                c,
                "printf(\"field {structure} {field} %zu %zu\\n\", offsetof(struct {structure}, {field}), \
                 sizeof(((struct {structure} *)0)->{field}));"
            );
        }
    }
    for name in questions.numbers.iter().chain(&questions.ioctls) {
        let _ = writeln!(c, "printf(\"number {name} %llu\\n\", (unsigned long long)({name}));");
    }
    for name in &questions.texts {
        let _ = writeln!(c, "printf(\"text {name} \"); fwrite({name}, 1, strlen({name}), stdout); puts(\"\");");
    }
    for name in &questions.ioctls {
        let _ = writeln!(c, "printf(\"ioctl {name} %llu\\n\", (unsigned long long)_IOC_SIZE({name}));");
    }
    c.push_str("return 0;\n}\n");
    c
}

impl Answers {
    fn take(&mut self, line: &str) -> Option<()> {
        let words: Vec<&str> = line.split(' ').collect();
        match words.as_slice() {
            ["struct", name, size] => {
                self.sizes.insert((*name).to_owned(), size.parse().ok()?);
            }
            ["field", structure, field, offset, size] => {
                let key = ((*structure).to_owned(), (*field).to_owned());
                self.fields.insert(key, (offset.parse().ok()?, size.parse().ok()?));
            }
            ["number", name, value] => {
                self.values.insert((*name).to_owned(), Value::Number(value.parse().ok()?));
            }
            ["text", name, text] => {
                self.values.insert((*name).to_owned(), Value::Text(text.as_bytes().to_vec()));
            }
            ["ioctl", name, size] => {
                self.ioctl_sizes.insert((*name).to_owned(), size.parse().ok()?);
            }
            _ => return None,
        }
        Some(())
    }
}
