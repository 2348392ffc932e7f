/* SPDX-License-Identifier: (GPL-2.0 WITH Linux-syscall-note) OR BSD-3-Clause */
/*
 * User interface of the Peergate driver: /dev/peergateN.
 *
 * Each open of the file is one I/O address space (domain). Closing it waits for
 * nothing: what is in flight ends with the domain.
 *
 * Every ioctl takes a structure that starts with its own size. A newer kernel
 * reads what an older program did not fill as zero; a kernel that gets a larger
 * structure accepts it if the tail it does not know is zero.
 *
 *  ENOTTY      unknown ioctl
 *  E2BIG       the structure has a non-zero tail that this kernel does not know
 *  EINVAL      the structure is too short, a reserved field is not zero, or a
 *              value can never be valid
 *  EOPNOTSUPP  the device or this kernel does not do that
 *  ENOENT      no such endpoint, buffer or mapping in this file
 *  ESTALE      the buffer was freed, or the device lost its state (reopen)
 *  EACCES      a right is missing
 *  EDQUOT      a limit of the tenant is reached
 *  EBUSY       no credit left: read completions, then try again
 *  EALREADY    already so; nothing changed
 *  ERANGE      an address or length lies outside what the device offers
 *  EFAULT      a pointer of the caller is not readable or writable
 *  ENOMEM      no memory, or RLIMIT_MEMLOCK would be exceeded
 *  ETIMEDOUT   the device did not answer in time
 *  ENODEV      the device is gone
 *  EIO         any other refusal
 */
#ifndef _UAPI_LINUX_PEERGATE_H
#define _UAPI_LINUX_PEERGATE_H

#include <linux/ioctl.h>
#include <linux/types.h>

#define PEERGATE_TYPE		0xB7

/* Bits of the rights and access fields. */
#define PEERGATE_READ		(1 << 0)
#define PEERGATE_WRITE		(1 << 1)

/**
 * struct peergate_info - What the device offers (PEERGATE_INFO).
 * @size: sizeof(struct peergate_info)
 * @flags: zero
 * @version: out: version of the wire in force
 * @session: out: session of the device that this file belongs to; when the device
 *	loses its state another one begins, for files opened from then on
 * @domain: out: number of this file's domain, for reports only
 * @interrupt: out: PEERGATE_INTERRUPT_*
 * @iova_start: out: first address that may be mapped
 * @iova_last: out: last address that may be mapped
 * @page_size: out: granule of MAP in bytes
 * @max_batch: out: most work descriptors the driver puts into one chain
 * @endpoints: out: how many endpoints there are
 * @stream_credits: out: descriptors that one stream may hold
 * @max_in_flight: out: descriptors that all streams may hold
 * @max_streams: out: streams a file may use
 * @default_timeout_ms: out: deadline of a descriptor with timeout 0
 * @max_timeout_ms: out: longest deadline
 * @submit_queues: out: submission queues of the device
 * @pinned_bytes: out: bytes this file has pinned
 * @max_domains: out: files that can be open at a time
 * @max_mappings: out: mappings all files can hold
 *
 * All of it is of this file's session, also when that is over.
 */
struct peergate_info {
	__u32 size;
	__u32 flags;
	__u32 version;
	__u32 session;
	__u32 domain;
	__u32 interrupt;
	__u64 iova_start;
	__u64 iova_last;
	__u64 page_size;
	__u32 max_batch;
	__u32 endpoints;
	__u32 stream_credits;
	__u32 max_in_flight;
	__u32 max_streams;
	__u32 default_timeout_ms;
	__u32 max_timeout_ms;
	__u32 submit_queues;
	__u64 pinned_bytes;
	__u32 max_domains;
	__u32 max_mappings;
};

#define PEERGATE_INTERRUPT_INTX		1
#define PEERGATE_INTERRUPT_MSIX		2

/**
 * struct peergate_endpoint - One endpoint (PEERGATE_ENDPOINT).
 * @size: sizeof(struct peergate_endpoint)
 * @index: in: 0 to info.endpoints - 1
 * @endpoint: out: its number in every other call
 * @kind: out: PEERGATE_KIND_*
 * @engines: out: copy engines that work side by side
 * @memory_len: out: memory in bytes, 0 if there is none
 * @memory_free: out: bytes that are not allocated
 * @registers_len: out: size of the register page, 0 if there is none
 * @granularity: out: granule of ALLOC in bytes
 * @name: out: UTF-8, zero-terminated
 *
 * Endpoints are those of this file's session; ESTALE when it is over, since the
 * next one may have others.
 */
struct peergate_endpoint {
	__u32 size;
	__u32 index;
	__u32 endpoint;
	__u16 kind;
	__u16 engines;
	__u64 memory_len;
	__u64 memory_free;
	__u64 registers_len;
	__u64 granularity;
	__u8 name[40];
};

#define PEERGATE_KIND_GPU	1
#define PEERGATE_KIND_FPGA	2
#define PEERGATE_KIND_STORAGE	3
#define PEERGATE_KIND_MEMORY	4
#define PEERGATE_KIND_ENGINE	5

/**
 * struct peergate_map - Pin memory of the caller and map it (PEERGATE_MAP).
 * @size: sizeof(struct peergate_map)
 * @flags: PEERGATE_READ, PEERGATE_WRITE: what endpoints may do
 * @address: in: address in the caller's memory, a multiple of the page size
 * @length: in: bytes, a multiple of the page size
 * @iova: out: where endpoints see it
 *
 * The pages stay pinned until UNMAP or close and count against RLIMIT_MEMLOCK.
 */
struct peergate_map {
	__u32 size;
	__u32 flags;
	__u64 address;
	__u64 length;
	__u64 iova;
};

/**
 * struct peergate_unmap - Unmap and unpin one mapping (PEERGATE_UNMAP).
 * @size: sizeof(struct peergate_unmap)
 * @flags: zero
 * @iova: in: from MAP
 * @length: in: the length given to MAP
 *
 * Returns when no endpoint uses the memory any more; interruptible only by a
 * fatal signal, in which case the pages stay pinned until the device is done.
 */
struct peergate_unmap {
	__u32 size;
	__u32 flags;
	__u64 iova;
	__u64 length;
};

/**
 * struct peergate_alloc - Allocate endpoint memory and map it (PEERGATE_ALLOC).
 * @size: sizeof(struct peergate_alloc)
 * @flags: PEERGATE_READ, PEERGATE_WRITE, PEERGATE_ALLOC_REGISTERS
 * @endpoint: in: whose memory
 * @reserved: zero
 * @length: in: bytes, rounded up to the granularity; out: bytes allocated
 * @handle: out: names the buffer
 * @iova: out: where every endpoint of this file sees it
 */
struct peergate_alloc {
	__u32 size;
	__u32 flags;
	__u32 endpoint;
	__u32 reserved;
	__u64 length;
	__u64 handle;
	__u64 iova;
};

/* The endpoint's register page in place of memory; length 0 means all of it. */
#define PEERGATE_ALLOC_REGISTERS	(1 << 3)

/**
 * struct peergate_free - Free a buffer (PEERGATE_FREE).
 * @size: sizeof(struct peergate_free)
 * @flags: zero
 * @handle: in: from ALLOC
 *
 * Returns when no transfer uses the buffer any more.
 */
struct peergate_free {
	__u32 size;
	__u32 flags;
	__u64 handle;
};

/**
 * struct peergate_peer - Peer right (PEERGATE_PEER).
 * @size: sizeof(struct peergate_peer)
 * @op: PEERGATE_PEER_ENABLE, _DISABLE or _QUERY
 * @accessor: in: endpoint that reaches out
 * @owner: in: endpoint whose memory is reached
 * @rights: in: bits to enable or disable; out: bits in force
 * @path: out: PEERGATE_PATH_* that a transfer would take
 * @reason: out: why
 */
struct peergate_peer {
	__u32 size;
	__u32 op;
	__u32 accessor;
	__u32 owner;
	__u32 rights;
	__u16 path;
	__u16 reason;
};

#define PEERGATE_PEER_ENABLE	1
#define PEERGATE_PEER_DISABLE	2
#define PEERGATE_PEER_QUERY	3

/**
 * struct peergate_work - One unit of work for SUBMIT.
 * @opcode: PEERGATE_WORK_*
 * @flags: PEERGATE_WORK_SYSTEM, PEERGATE_WORK_ATOMIC_*
 * @stream: order within this file
 * @initiator: endpoint that acts, or PEERGATE_INITIATOR_ANY
 * @cookie: handed back
 * @source: address to read; what is compared by ATOMIC_COMPARE_SWAP
 * @destination: address to write
 * @length: bytes; 4 or 8 for ATOMIC
 * @timeout_ms: deadline from arrival at the device; 0 is the default
 * @reserved: zero
 * @operand: pattern of FILL, what ATOMIC adds or puts there, scope of FENCE
 */
struct peergate_work {
	__u16 opcode;
	__u16 reserved0;
	__u32 flags;
	__u32 stream;
	__u32 initiator;
	__u64 cookie;
	__u64 source;
	__u64 destination;
	__u64 length;
	__u32 timeout_ms;
	__u32 reserved;
	__u64 operand;
};

#define PEERGATE_WORK_COPY	1
#define PEERGATE_WORK_FILL	4
#define PEERGATE_WORK_ATOMIC	7
#define PEERGATE_WORK_FENCE	8
#define PEERGATE_WORK_SYSTEM	(1 << 0)
/* One of these with PEERGATE_WORK_ATOMIC. */
#define PEERGATE_WORK_ATOMIC_ADD		(1 << 8)
#define PEERGATE_WORK_ATOMIC_SWAP	(2 << 8)
#define PEERGATE_WORK_ATOMIC_COMPARE_SWAP	(3 << 8)
#define PEERGATE_INITIATOR_ANY	0x0000ffff

/**
 * struct peergate_submit - Submit an array of work (PEERGATE_SUBMIT).
 * @size: sizeof(struct peergate_submit)
 * @flags: zero
 * @work: in: pointer to struct peergate_work[]
 * @count: in: how many; out: how many were taken
 * @queue: in: submission queue, 0 to info.submit_queues - 1
 *
 * Does not wait. Takes as many as completion ring and queue have room for; 0
 * taken is EBUSY. Every one taken completes in the completion ring.
 */
struct peergate_submit {
	__u32 size;
	__u32 flags;
	__u64 work;
	__u32 count;
	__u32 queue;
};

/**
 * struct peergate_completion - One entry of the completion ring.
 * @cookie: of the work
 * @bytes: moved
 * @fault_address: first address refused, with FAULT and DENIED; what the word
 *                 of an ATOMIC was that ended OK
 * @path: PEERGATE_PATH_*
 * @reason: why that path
 * @fault_reason: why it was refused
 * @reserved: zero
 * @status: status of the device, 0 is success (virtio_peergate.h)
 */
struct peergate_completion {
	__u64 cookie;
	__u64 bytes;
	__u64 fault_address;
	__u8 path;
	__u8 reason;
	__u8 fault_reason;
	__u8 reserved;
	__u32 status;
};

/**
 * struct peergate_ring - Head of the completion ring.
 * @tail: written by the kernel (release): entries produced so far, modulo 2^32
 * @head: written by the program (release): entries consumed so far
 * @mask: entries - 1; entries is a power of two
 * @entry_offset: bytes from the start of the mapping to entry 0
 *
 * mmap(PROT_READ | PROT_WRITE, MAP_SHARED) of the file at PEERGATE_MMAP_RING
 * with the length that PEERGATE_RING returned. Entry n is at
 * entry_offset + (n & mask) * 32. The kernel never overwrites an entry that was
 * not consumed: SUBMIT takes no more work than the ring has room for.
 */
struct peergate_ring {
	__u32 tail;
	__u32 reserved0[15];
	__u32 head;
	__u32 reserved1[15];
	__u32 mask;
	__u32 entry_offset;
	__u32 reserved2[14];
};

#define PEERGATE_MMAP_RING	0

/**
 * struct peergate_ring_setup - Create the completion ring (PEERGATE_RING).
 * @size: sizeof(struct peergate_ring_setup)
 * @flags: zero
 * @entries: in: power of two, 64 to 65536
 * @reserved: zero
 * @length: out: bytes to mmap
 *
 * Once per file, before the first SUBMIT; a second call is EALREADY.
 */
struct peergate_ring_setup {
	__u32 size;
	__u32 flags;
	__u32 entries;
	__u32 reserved;
	__u64 length;
};

/**
 * struct peergate_wait - Wait for completions (PEERGATE_WAIT).
 * @size: sizeof(struct peergate_wait)
 * @flags: zero
 * @count: in: return when this many entries are in the ring
 * @reserved: zero
 * @deadline_ns: in: absolute CLOCK_MONOTONIC; 0 returns at once
 *
 * ETIMEDOUT when the deadline passes first; EINTR on a signal.
 */
struct peergate_wait {
	__u32 size;
	__u32 flags;
	__u32 count;
	__u32 reserved;
	__u64 deadline_ns;
};

/**
 * struct peergate_stream - Reset a stream or cancel work (PEERGATE_STREAM).
 * @size: sizeof(struct peergate_stream)
 * @op: PEERGATE_STREAM_RESET or _CANCEL
 * @stream: in: the stream
 * @flags: in: PEERGATE_CANCEL_ALL
 * @cookie: in: which work to cancel
 * @cancelled: out: descriptors that end as CANCELLED
 * @running: out: descriptors that were running and end as they do
 */
struct peergate_stream {
	__u32 size;
	__u32 op;
	__u32 stream;
	__u32 flags;
	__u64 cookie;
	__u32 cancelled;
	__u32 running;
};

#define PEERGATE_STREAM_RESET	1
#define PEERGATE_STREAM_CANCEL	2
#define PEERGATE_CANCEL_ALL	(1 << 0)

#define PEERGATE_PATH_NONE	0
#define PEERGATE_PATH_DIRECT	1
#define PEERGATE_PATH_STAGED	2
#define PEERGATE_PATH_LOCAL	3

/**
 * struct peergate_event - What read() of the file returns, one or more whole.
 * @kind: PEERGATE_EVENT_*
 * @reason: PEERGATE_FAULT_* of virtio_peergate.h
 * @access: PEERGATE_READ, PEERGATE_WRITE
 * @session: session of the device
 * @seq: counts the device's events
 * @dropped_total: events lost, by the device or because this file did not read
 * @accessor: endpoint that acted, 0xffffffff if unknown
 * @owner: endpoint whose memory it was, 0xffffffff if unknown
 * @stream: stream of the work
 * @reserved: zero
 * @address: first address refused
 * @cookie: of the work
 * @value: vector of an interrupt, handle of a stale buffer
 *
 * read() blocks unless O_NONBLOCK. poll() reports POLLIN | POLLRDNORM when read()
 * has an event, POLLPRI when the completion ring holds an entry, POLLHUP when
 * the device is gone.
 */
struct peergate_event {
	__u16 kind;
	__u8 reason;
	__u8 access;
	__u32 session;
	__u64 seq;
	__u64 dropped_total;
	__u32 accessor;
	__u32 owner;
	__u32 stream;
	__u32 reserved;
	__u64 address;
	__u64 cookie;
	__u64 value;
};

#define PEERGATE_EVENT_FAULT		1
#define PEERGATE_EVENT_OVERFLOW		7
#define PEERGATE_EVENT_INTERRUPT	8

#define PEERGATE_INFO		_IOWR(PEERGATE_TYPE, 0x00, struct peergate_info)
#define PEERGATE_ENDPOINT	_IOWR(PEERGATE_TYPE, 0x01, struct peergate_endpoint)
#define PEERGATE_RING		_IOWR(PEERGATE_TYPE, 0x02, struct peergate_ring_setup)
#define PEERGATE_MAP		_IOWR(PEERGATE_TYPE, 0x10, struct peergate_map)
#define PEERGATE_UNMAP		_IOW(PEERGATE_TYPE, 0x11, struct peergate_unmap)
#define PEERGATE_ALLOC		_IOWR(PEERGATE_TYPE, 0x20, struct peergate_alloc)
#define PEERGATE_FREE		_IOW(PEERGATE_TYPE, 0x21, struct peergate_free)
#define PEERGATE_PEER		_IOWR(PEERGATE_TYPE, 0x30, struct peergate_peer)
#define PEERGATE_SUBMIT		_IOWR(PEERGATE_TYPE, 0x40, struct peergate_submit)
#define PEERGATE_WAIT		_IOW(PEERGATE_TYPE, 0x41, struct peergate_wait)
#define PEERGATE_STREAM		_IOWR(PEERGATE_TYPE, 0x42, struct peergate_stream)

#endif /* _UAPI_LINUX_PEERGATE_H */
