/* SPDX-License-Identifier: (GPL-2.0 WITH Linux-syscall-note) OR BSD-3-Clause */
/*
 * The virtual P2P DMA device: what the driver and the device say to each other.
 * vdev/wire/SPEC.md is the specification; vdev/wire is the device's copy, and a
 * test compares the two.
 */
#ifndef _UAPI_LINUX_VIRTIO_PEERGATE_H
#define _UAPI_LINUX_VIRTIO_PEERGATE_H

#include <linux/types.h>

#define VIRTIO_ID_PEERGATE		37

#define VIRTIO_PEERGATE_MAGIC		"PEERGATE"
#define VIRTIO_PEERGATE_VERSION		1
#define VIRTIO_PEERGATE_PAGE_SIZE	4096
#define VIRTIO_PEERGATE_MAX_CHAIN	64

#define VIRTIO_PEERGATE_VQ_CONTROL	0
#define VIRTIO_PEERGATE_VQ_EVENT	1
#define VIRTIO_PEERGATE_VQ_SUBMIT	2

/* Configuration space, read-only. */
struct virtio_peergate_config {
	__u8 magic[8];
	__le16 version;
	__le16 version_min;
	__le32 session;
	__le64 features;
	__le16 submit_queues;
	__le16 endpoints;
	__le16 max_batch;
	__le16 reserved0;
	__le64 reserved[4];
};

/* Status of a control request or a work descriptor. */
#define VIRTIO_PEERGATE_S_OK		0x00
#define VIRTIO_PEERGATE_S_IOERR		0x01
#define VIRTIO_PEERGATE_S_UNSUPP	0x02
#define VIRTIO_PEERGATE_S_DEVERR	0x03
#define VIRTIO_PEERGATE_S_INVAL		0x04
#define VIRTIO_PEERGATE_S_RANGE		0x05
#define VIRTIO_PEERGATE_S_NOENT		0x06
#define VIRTIO_PEERGATE_S_FAULT		0x07
#define VIRTIO_PEERGATE_S_NOMEM		0x08
#define VIRTIO_PEERGATE_S_QUOTA		0x40
#define VIRTIO_PEERGATE_S_STALE		0x41
#define VIRTIO_PEERGATE_S_REVOKED	0x42
#define VIRTIO_PEERGATE_S_CANCELLED	0x43
#define VIRTIO_PEERGATE_S_TIMEOUT	0x44
#define VIRTIO_PEERGATE_S_DEADLOCK	0x45
#define VIRTIO_PEERGATE_S_POISONED	0x46
#define VIRTIO_PEERGATE_S_LOST		0x47
#define VIRTIO_PEERGATE_S_NO_APERTURE	0x48
#define VIRTIO_PEERGATE_S_BUSY		0x49
#define VIRTIO_PEERGATE_S_ALREADY	0x4a
#define VIRTIO_PEERGATE_S_DENIED	0x4b
/* What the driver writes into a completion record before it submits. */
#define VIRTIO_PEERGATE_S_PENDING	0xffffffff

/* Control opcodes. */
#define VIRTIO_PEERGATE_OP_HELLO	0x01
#define VIRTIO_PEERGATE_OP_PROBE	0x02
#define VIRTIO_PEERGATE_OP_ATTACH	0x10
#define VIRTIO_PEERGATE_OP_DETACH	0x11
#define VIRTIO_PEERGATE_OP_MAP		0x12
#define VIRTIO_PEERGATE_OP_UNMAP	0x13
#define VIRTIO_PEERGATE_OP_FLUSH	0x14
#define VIRTIO_PEERGATE_OP_ALLOC	0x20
#define VIRTIO_PEERGATE_OP_FREE		0x21
#define VIRTIO_PEERGATE_OP_PEER_ENABLE	0x30
#define VIRTIO_PEERGATE_OP_PEER_DISABLE	0x31
#define VIRTIO_PEERGATE_OP_PEER_QUERY	0x32
#define VIRTIO_PEERGATE_OP_STREAM_RESET	0x40
#define VIRTIO_PEERGATE_OP_CANCEL	0x41

struct virtio_peergate_control {
	__le16 opcode;
	__le16 flags;
	__le32 domain;
	__le32 session;
	__le32 reserved;
};

struct virtio_peergate_reply {
	__le32 status;
	__le32 length;
	__le64 detail;
};

struct virtio_peergate_hello {
	__le16 version;
	__le16 reserved0;
	__le32 reserved;
	__le64 features;
};

struct virtio_peergate_hello_reply {
	__le16 version;
	__le16 reserved0;
	__le32 session;
	__le64 features;
};

struct virtio_peergate_probe_reply {
	__le64 iova_start;
	__le64 iova_last;
	__le64 page_size_mask;
	__le32 max_domains;
	__le32 max_mappings;
	__le32 max_segments;
	__le32 max_buffers;
	__le32 stream_credits;
	__le32 max_in_flight;
	__le32 max_streams;
	__le32 default_timeout_ms;
	__le32 max_timeout_ms;
	__le16 max_batch;
	__le16 endpoint_count;
	__le64 reserved[3];
};

#define VIRTIO_PEERGATE_KIND_GPU	1
#define VIRTIO_PEERGATE_KIND_FPGA	2
#define VIRTIO_PEERGATE_KIND_STORAGE	3
#define VIRTIO_PEERGATE_KIND_MEMORY	4
#define VIRTIO_PEERGATE_KIND_ENGINE	5

struct virtio_peergate_endpoint {
	__le32 endpoint;
	__le16 kind;
	__le16 engines;
	__le64 memory_len;
	__le64 memory_free;
	__le64 registers_len;
	__le64 granularity;
	__u8 name[32];
};

#define VIRTIO_PEERGATE_ENDPOINT_ALL	0xffffffff

struct virtio_peergate_attach {
	__le32 endpoint;
	__le32 flags;
};

#define VIRTIO_PEERGATE_MAP_READ	(1 << 0)
#define VIRTIO_PEERGATE_MAP_WRITE	(1 << 1)
#define VIRTIO_PEERGATE_ALLOC_WINDOWABLE (1 << 2)
#define VIRTIO_PEERGATE_ALLOC_REGISTERS	(1 << 3)

struct virtio_peergate_map {
	__le64 iova;
	__le32 flags;
	__le32 segment_count;
};

struct virtio_peergate_map_segment {
	__le64 gpa;
	__le64 len;
};

struct virtio_peergate_unmap {
	__le64 iova_start;
	__le64 iova_last;
};

struct virtio_peergate_flush {
	__le64 reserved;
};

struct virtio_peergate_alloc {
	__le32 endpoint;
	__le32 flags;
	__le64 iova;
	__le64 len;
};

struct virtio_peergate_alloc_reply {
	__le64 handle;
};

struct virtio_peergate_free {
	__le64 handle;
};

#define VIRTIO_PEERGATE_PEER_READ	(1 << 0)
#define VIRTIO_PEERGATE_PEER_WRITE	(1 << 1)

struct virtio_peergate_peer {
	__le32 accessor;
	__le32 owner;
	__le32 rights;
	__le32 reserved;
};

struct virtio_peergate_peer_reply {
	__le32 rights;
	__le16 path;
	__le16 reason;
};

struct virtio_peergate_stream_reset {
	__le32 stream;
	__le32 reserved;
};

#define VIRTIO_PEERGATE_CANCEL_STREAM	(1 << 0)

struct virtio_peergate_cancel {
	__le32 stream;
	__le32 flags;
	__le64 cookie;
};

struct virtio_peergate_cancel_reply {
	__le32 cancelled;
	__le32 running;
};

/* Submission. */
struct virtio_peergate_submit {
	__le16 version;
	__le16 count;
	__le32 domain;
	__le32 flags;
	__le32 session;
};

#define VIRTIO_PEERGATE_WORK_COPY	1
#define VIRTIO_PEERGATE_WORK_FILL	4
#define VIRTIO_PEERGATE_WORK_ATOMIC	7
#define VIRTIO_PEERGATE_WORK_FENCE	8

#define VIRTIO_PEERGATE_FENCE_DEVICE	1
#define VIRTIO_PEERGATE_FENCE_PEER	2
#define VIRTIO_PEERGATE_FENCE_SYSTEM	3

#define VIRTIO_PEERGATE_WORK_SYSTEM	(1 << 0)
/* One of these with VIRTIO_PEERGATE_WORK_ATOMIC. */
#define VIRTIO_PEERGATE_WORK_ATOMIC_ADD		(1 << 8)
#define VIRTIO_PEERGATE_WORK_ATOMIC_SWAP	(2 << 8)
#define VIRTIO_PEERGATE_WORK_ATOMIC_COMPARE_SWAP	(3 << 8)
#define VIRTIO_PEERGATE_WORK_ATOMIC_MASK	(0xf << 8)
#define VIRTIO_PEERGATE_INITIATOR_ANY	0x0000ffff

struct virtio_peergate_work {
	__le16 opcode;
	__u8 ext;
	__u8 reserved0;
	__le32 flags;
	__le32 stream;
	__le32 initiator;
	__le64 cookie;
	__le64 source;
	__le64 destination;
	__le64 length;
	__le32 timeout_ms;
	__le32 reserved1;
	__le64 operand;
};

#define VIRTIO_PEERGATE_PATH_NONE	0
#define VIRTIO_PEERGATE_PATH_DIRECT	1
#define VIRTIO_PEERGATE_PATH_STAGED	2
#define VIRTIO_PEERGATE_PATH_LOCAL	3

#define VIRTIO_PEERGATE_REASON_NONE		0
#define VIRTIO_PEERGATE_REASON_SAME_DEVICE	1
#define VIRTIO_PEERGATE_REASON_REACHABLE	2
#define VIRTIO_PEERGATE_REASON_UNREACHABLE	3
#define VIRTIO_PEERGATE_REASON_POLICY		4
#define VIRTIO_PEERGATE_REASON_ENGINE_CANNOT	5
#define VIRTIO_PEERGATE_REASON_UNPROVEN		6

struct virtio_peergate_completion {
	__le64 cookie;
	__le64 bytes;
	__le64 fault_address;
	__u8 path;
	__u8 reason;
	__u8 fault_reason;
	__u8 reserved;
	__le32 status;
};

/* Events. */
#define VIRTIO_PEERGATE_EVENT_FAULT	1
#define VIRTIO_PEERGATE_EVENT_OVERFLOW	7
#define VIRTIO_PEERGATE_EVENT_INTERRUPT	8

#define VIRTIO_PEERGATE_FAULT_DOMAIN	1
#define VIRTIO_PEERGATE_FAULT_MAPPING	2
#define VIRTIO_PEERGATE_FAULT_PERMISSION 3
#define VIRTIO_PEERGATE_FAULT_PEER	4
#define VIRTIO_PEERGATE_FAULT_STALE	5
#define VIRTIO_PEERGATE_FAULT_DRAINING	6
#define VIRTIO_PEERGATE_FAULT_ACCESS	7

#define VIRTIO_PEERGATE_ACCESS_READ	(1 << 0)
#define VIRTIO_PEERGATE_ACCESS_WRITE	(1 << 1)
#define VIRTIO_PEERGATE_OWNER_HIDDEN	0xffffffff

struct virtio_peergate_event {
	__le16 kind;
	__u8 reason;
	__u8 access;
	__le32 session;
	__le64 seq;
	__le64 dropped_total;
	__le32 domain;
	__le32 accessor;
	__le32 owner;
	__le32 stream;
	__le64 address;
	__le64 cookie;
	__le64 value;
};

#endif /* _UAPI_LINUX_VIRTIO_PEERGATE_H */
