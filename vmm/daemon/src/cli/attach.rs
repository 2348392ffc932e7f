//! The arguments that attach a tenant's device to a VM, and the refusal of what would crash the VMM.
//!
//! The numbers are those of QEMU 11.1 and cloud-hypervisor 53. Not here: asking the daemon, printing.

use std::path::{Path, PathBuf};

use clap::ValueEnum;

/// A VMM whose arguments are known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Vmm {
    /// QEMU 11.1 or later.
    Qemu,
    /// cloud-hypervisor 53 or later.
    CloudHypervisor,
}

/// What to attach, and how.
#[derive(Clone, Debug)]
pub(crate) struct Attachment {
    /// The tenant's socket.
    pub(crate) socket: PathBuf,
    /// Virtio device id.
    pub(crate) device_id: u32,
    /// Queues in all.
    pub(crate) queues: u32,
    /// Entries of each queue.
    pub(crate) queue_size: u32,
    /// Longest queue the device takes.
    pub(crate) max_queue_size: u32,
    /// Bytes of configuration space.
    pub(crate) config_size: u32,
    /// The guest's memory in bytes.
    pub(crate) memory: u64,
}

/// What a VMM cannot do, or would not survive.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum AttachError {
    #[error(
        "QEMU aborts with virtio id {id}: it knows 1 to 13, 16 to 41 and 45. Set the tenant's device_id, or pass --device-id 37"
    )]
    QemuId { id: u32 },
    #[error(
        "cloud-hypervisor refuses virtio id {id}, which is its {name}. Set the tenant's device_id, or pass --device-id 37"
    )]
    CloudHypervisorId { id: u32, name: &'static str },
    #[error("A queue of {size} entries does not work: a split ring has a power of two. Pass --queue-size 256")]
    QueueSizePower { size: u32 },
    #[error("A queue of {size} entries is too long: {why}. Pass --queue-size {most} or less")]
    QueueSize { size: u32, most: u32, why: &'static str },
    #[error("The device has {size} bytes of configuration space; QEMU asserts that there are 256 at most")]
    ConfigSize { size: u32 },
    #[error("A guest with {bytes} bytes of memory does not work: VMMs count in MiB. Pass --memory 2G")]
    Memory { bytes: u64 },
    #[error("cloud-hypervisor cannot be told of the socket {}: commas, brackets and quotes have a meaning to it. Set the tenant's socket", path.display())]
    SocketPath { path: PathBuf },
}

const QEMU_MAX_QUEUE: u32 = 1024;
const QEMU_MAX_CONFIG: u32 = 256;
const MIB: u64 = 1 << 20;

/// The arguments, one to a word as the VMM is started.
pub(crate) fn arguments(vmm: Vmm, attachment: &Attachment) -> Result<Vec<String>, AttachError> {
    let Attachment { queue_size: size, max_queue_size: most, memory, .. } = *attachment;
    if !size.is_power_of_two() {
        return Err(AttachError::QueueSizePower { size });
    }
    if vmm == Vmm::Qemu && size > QEMU_MAX_QUEUE {
        return Err(AttachError::QueueSize { size, most: QEMU_MAX_QUEUE.min(most), why: "QEMU aborts beyond 1024" });
    }
    if size > most {
        return Err(AttachError::QueueSize { size, most, why: "the device takes no longer one" });
    }
    if memory == 0 || !memory.is_multiple_of(MIB) {
        return Err(AttachError::Memory { bytes: memory });
    }
    match vmm {
        Vmm::Qemu => qemu(attachment),
        Vmm::CloudHypervisor => cloud_hypervisor(attachment),
    }
}

/// QEMU takes memory files that are shared, one queue size for all queues, and aborts on what it does not know.
fn qemu(attachment: &Attachment) -> Result<Vec<String>, AttachError> {
    let Attachment { device_id: id, queues, queue_size, config_size: size, memory, .. } = *attachment;
    if !matches!(id, 1..=13 | 16..=41 | 45) {
        return Err(AttachError::QemuId { id });
    }
    if size > QEMU_MAX_CONFIG {
        return Err(AttachError::ConfigSize { size });
    }
    let memory = in_mib(memory);
    // A comma ends an option; two are one.
    let socket = text(&attachment.socket).replace(',', ",,");
    let words = [
        "-m",
        &memory,
        "-object",
        &format!("memory-backend-memfd,id=peergate-memory,size={memory},share=on"),
        "-numa",
        "node,memdev=peergate-memory",
        "-chardev",
        &format!("socket,id=peergate-socket,path={socket}"),
        "-device",
        &format!(
            "vhost-user-test-device-pci,chardev=peergate-socket,virtio-id={id},num_vqs={queues},vq_size={queue_size},config_size={size}"
        ),
    ];
    Ok(words.map(str::to_owned).into())
}

fn cloud_hypervisor(attachment: &Attachment) -> Result<Vec<String>, AttachError> {
    let id = attachment.device_id;
    let reserved = [(23, "iommu"), (35, "watchdog")];
    if let Some((_, name)) = reserved.into_iter().find(|(number, _)| *number == id) {
        return Err(AttachError::CloudHypervisorId { id, name });
    }
    let socket = text(&attachment.socket);
    if socket.contains([',', '[', ']', '"']) {
        return Err(AttachError::SocketPath { path: attachment.socket.clone() });
    }
    let sizes = vec![attachment.queue_size.to_string(); usize::try_from(attachment.queues).unwrap_or(0)].join(",");
    let words = [
        "--memory",
        &format!("size={},shared=on", in_mib(attachment.memory)),
        "--generic-vhost-user",
        &format!("device_type={id},socket={socket},queue_sizes=[{sizes}]"),
    ];
    Ok(words.map(str::to_owned).into())
}

fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

fn in_mib(bytes: u64) -> String {
    format!("{}M", bytes / MIB)
}

/// The words as lines for a shell: an option and its value a line, quoted where a shell would see more than a word.
pub(crate) fn for_shell(words: &[String]) -> String {
    let lines: Vec<_> =
        words.chunks(2).map(|words| words.iter().map(|word| quoted(word)).collect::<Vec<_>>().join(" ")).collect();
    lines.join(" \\\n") + "\n"
}

fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_.,=/:+".contains(c);
    if word.chars().all(plain) { word.to_owned() } else { format!("'{}'", word.replace('\'', "'\\''")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn demo() -> Attachment {
        Attachment {
            socket: "/run/peergate/demo.sock".into(),
            device_id: 37,
            queues: 4,
            queue_size: 256,
            max_queue_size: 1024,
            config_size: 64,
            memory: 2 << 30,
        }
    }

    #[test]
    fn qemu_gets_shared_memory_a_socket_and_the_device() {
        assert_eq!(
            for_shell(&arguments(Vmm::Qemu, &demo()).unwrap()),
            "-m 2048M \\\n\
             -object memory-backend-memfd,id=peergate-memory,size=2048M,share=on \\\n\
             -numa node,memdev=peergate-memory \\\n\
             -chardev socket,id=peergate-socket,path=/run/peergate/demo.sock \\\n\
             -device vhost-user-test-device-pci,chardev=peergate-socket,virtio-id=37,num_vqs=4,vq_size=256,config_size=64\n"
        );
    }

    #[test]
    fn cloud_hypervisor_gets_shared_memory_and_the_device() {
        let wish = Attachment { queues: 3, memory: 512 << 20, device_id: 4242, ..demo() };
        assert_eq!(
            for_shell(&arguments(Vmm::CloudHypervisor, &wish).unwrap()),
            "--memory size=512M,shared=on \\\n\
             --generic-vhost-user 'device_type=4242,socket=/run/peergate/demo.sock,queue_sizes=[256,256,256]'\n"
        );
    }

    #[test]
    fn every_id_that_qemu_aborts_on_is_refused_and_no_other() {
        let accepted: Vec<_> =
            (0..100).filter(|id| arguments(Vmm::Qemu, &Attachment { device_id: *id, ..demo() }).is_ok()).collect();
        let known: Vec<u32> = (1..=13).chain(16..=41).chain([45]).collect();
        assert_eq!(accepted, known);
        let error = arguments(Vmm::Qemu, &Attachment { device_id: 42, ..demo() }).unwrap_err();
        assert_eq!(
            error.to_string(),
            "QEMU aborts with virtio id 42: it knows 1 to 13, 16 to 41 and 45. Set the tenant's device_id, or pass --device-id 37"
        );
    }

    #[test]
    fn the_two_ids_that_cloud_hypervisor_refuses_are_refused_with_what_they_are() {
        for (id, name) in [(23, "iommu"), (35, "watchdog")] {
            let error = arguments(Vmm::CloudHypervisor, &Attachment { device_id: id, ..demo() }).unwrap_err();
            assert_eq!(error, AttachError::CloudHypervisorId { id, name });
        }
    }

    #[test]
    fn queue_sizes_that_do_not_work_are_refused() {
        let refused = |vmm, queue_size, max_queue_size| {
            arguments(vmm, &Attachment { queue_size, max_queue_size, ..demo() }).unwrap_err().to_string()
        };
        let power = "A queue of 100 entries does not work: a split ring has a power of two. Pass --queue-size 256";
        assert_eq!(refused(Vmm::Qemu, 100, 1024), power);
        assert!(refused(Vmm::CloudHypervisor, 0, 1024).contains("power of two"));
        let abort = "A queue of 2048 entries is too long: QEMU aborts beyond 1024. Pass --queue-size 1024 or less";
        assert_eq!(refused(Vmm::Qemu, 2048, 32768), abort);
        let device =
            "A queue of 2048 entries is too long: the device takes no longer one. Pass --queue-size 1024 or less";
        assert_eq!(refused(Vmm::CloudHypervisor, 2048, 1024), device);
    }

    #[test]
    fn configuration_space_that_qemu_asserts_on_is_refused() {
        let large = Attachment { config_size: 257, ..demo() };
        assert_eq!(arguments(Vmm::Qemu, &large).unwrap_err(), AttachError::ConfigSize { size: 257 });
        assert!(arguments(Vmm::CloudHypervisor, &large).is_ok());
    }

    #[test]
    fn memory_that_is_no_number_of_mib_is_refused() {
        for memory in [0, 1, (1 << 30) + 4096] {
            let error = arguments(Vmm::Qemu, &Attachment { memory, ..demo() }).unwrap_err();
            assert_eq!(error, AttachError::Memory { bytes: memory });
        }
    }

    #[test]
    fn paths_that_mean_something_to_a_vmm_or_a_shell_come_through_or_are_refused() {
        let odd = Attachment { socket: "/tmp/a b,c/it's.sock".into(), ..demo() };
        let shell = for_shell(&arguments(Vmm::Qemu, &odd).unwrap());
        assert!(shell.contains(r"'socket,id=peergate-socket,path=/tmp/a b,,c/it'\''s.sock'"), "{shell}");
        assert!(matches!(arguments(Vmm::CloudHypervisor, &odd), Err(AttachError::SocketPath { .. })));
    }
}
