/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Peergate driver: what its files share.
 *
 * main.c	the virtio driver: probe, queues, remove
 * session.c	version, limits, endpoints, a session that ends
 * vq.c		control requests
 * file.c	/dev/peergateN: open, release, read, poll, mmap
 * ioctl.c	its ioctls
 * range.c	I/O virtual addresses
 * mem.c	pinned memory
 * buffer.c	memory of endpoints
 * submit.c	submission chains
 * ring.c	the completion ring
 * event.c	the event queue and each file's event fifo
 *
 * Lifetime. A &struct pg_device lives as long as its &struct device has
 * references: the bound virtio device and each &struct pg_file hold one. A
 * &struct pg_file lives as long as something of it may be in the device: the
 * open file and then its DETACH hold one reference, each chain and each request
 * with an owner another. Pins go with the last one at the latest. A &struct
 * pg_session lives as long as it is in force or a file belongs to it: limits and
 * endpoints that a file sees are those of its session, whatever the device has
 * become since.
 *
 * Going away. pg_device.state only ever grows. It leaves PG_LIVE before a grace
 * period of RCU: who reads PG_LIVE under rcu_read_lock() may touch virtqueues
 * until rcu_read_unlock(). It becomes PG_GONE after the reset, when the device
 * can no longer reach memory of the guest.
 *
 * Locks, outermost first:
 *
 *  mmap_lock -> pg_file.lock
 *  pg_queue.lock -> pg_ring.lock -> wait queues
 *  pg_queue.lock -> xa_lock of pg_device.files -> pg_file.event_lock -> wait queues
 *  pg_device.session_lock
 *
 * No lock is held while pages are pinned or user memory is copied.
 */
#ifndef _PEERGATE_INTERNAL_H
#define _PEERGATE_INTERNAL_H

#include <linux/cdev.h>
#include <linux/completion.h>
#include <linux/device.h>
#include <linux/kfifo.h>
#include <linux/kref.h>
#include <linux/list.h>
#include <linux/maple_tree.h>
#include <linux/mutex.h>
#include <linux/peergate.h>
#include <linux/refcount.h>
#include <linux/scatterlist.h>
#include <linux/spinlock.h>
#include <linux/virtio.h>
#include <linux/virtio_peergate.h>
#include <linux/wait.h>
#include <linux/workqueue.h>
#include <linux/xarray.h>

#include "peergate_compat.h"

/* Trees and arrays here are indexed by addresses and handles of 64 bits. */
static_assert(BITS_PER_LONG == 64);

/* Submission queues and endpoints of one device that the driver will use. */
#define PG_MAX_QUEUES		64
#define PG_MAX_ENDPOINTS	256
/* Work descriptors in one chain. */
#define PG_MAX_BATCH		64
/* Parts of a control request; the wire allows VIRTIO_PEERGATE_MAX_CHAIN. */
#define PG_MAX_SG		62
/* Segments in one MAP: 33 pages at most, so that they fit in PG_MAX_SG parts. */
#define PG_MAX_SEGMENTS		8192
/* Buffers kept on the event queue. */
#define PG_EVENT_BUFFERS	64
/* Events that a file holds for read(). */
#define PG_EVENT_FIFO		256

/**
 * enum pg_state - How far the device is from gone.
 * @PG_LIVE: in use
 * @PG_DYING: being removed; takes nothing new, but may still use memory
 * @PG_GONE: reset; nothing is in flight
 */
enum pg_state {
	PG_LIVE,
	PG_DYING,
	PG_GONE,
};

/**
 * struct pg_queue - A virtqueue.
 * @dev: whose
 * @vq: the virtqueue; not valid once the device is gone
 * @lock: guards @vq; of the control queue also pg_device.backlog and
 *	pg_device.sg
 */
struct pg_queue {
	struct pg_device *dev;
	struct virtqueue *vq;
	spinlock_t lock;
};

/**
 * struct pg_session - What the device offers, from one HELLO to the next.
 * @refs: see the top of this file
 * @number: the session, from HELLO
 * @version: of the wire, from HELLO
 * @iova_start: first address to map, a multiple of the page size and not 0
 * @iova_last: last one
 * @max_domains: limit of the device
 * @max_mappings: limit of the device
 * @max_segments: segments to put into one MAP
 * @stream_credits: limit of the device
 * @max_in_flight: limit of the device
 * @max_streams: limit of the device
 * @default_timeout_ms: deadline of work without one
 * @max_timeout_ms: longest deadline
 * @max_batch: descriptors to put into one chain
 * @domains: domains in use
 * @closing: domains that wait for their end
 * @endpoint_count: entries of @endpoints
 * @endpoints: as PROBE described them
 *
 * Nothing in it changes but @refs, @domains and @closing.
 */
struct pg_session {
	refcount_t refs;
	u32 number;
	u32 version;
	u64 iova_start;
	u64 iova_last;
	u32 max_domains;
	u32 max_mappings;
	u32 max_segments;
	u32 stream_credits;
	u32 max_in_flight;
	u32 max_streams;
	u32 default_timeout_ms;
	u32 max_timeout_ms;
	u32 max_batch;
	atomic_t domains;
	atomic_t closing;
	u32 endpoint_count;
	struct peergate_endpoint endpoints[];
};

/**
 * struct pg_device - A Peergate device.
 * @dev: /dev/peergateN; holds this structure
 * @cdev: its character device
 * @vdev: the virtio device; not valid once the device is gone
 * @state: &enum pg_state, see the top of this file
 * @queues: all queues, control and event queue first
 * @queue_count: how many
 * @backlog: requests that the control queue had no room for
 * @sg: parts of the request that is being put on the control queue
 * @control_work: takes answers from the control queue
 * @config_work: looks for a new session
 * @stranded: files whose DETACH the device refused; guarded by the control
 *	queue's lock
 * @events: buffers of the event queue
 * @files: by domain; xa_lock also covers delivery of events
 * @next_domain: where to look for a free domain
 * @domain_wait: waiters for a domain
 * @session_lock: guards which one @session is
 * @session: the last that was begun, set before the device can be opened;
 *	replaced by probe and then by @config_work, which need no lock to read it
 * @interrupt: PEERGATE_INTERRUPT_*
 */
struct pg_device {
	struct device dev;
	struct cdev cdev;
	struct virtio_device *vdev;
	enum pg_state state;

	struct pg_queue *queues;
	unsigned int queue_count;
	struct list_head backlog;
	struct scatterlist sg[PG_MAX_SG];
	struct delayed_work control_work;
	struct work_struct config_work;
	struct list_head stranded;

	struct virtio_peergate_event *events;

	struct xarray files;
	u32 next_domain;
	wait_queue_head_t domain_wait;

	spinlock_t session_lock;
	struct pg_session *session;
	u32 interrupt;
};

/**
 * struct pg_ring - A file's completion ring.
 * @area: head of the ring, shared with the program
 * @entries: entries of the ring, shared with the program
 * @mask: number of entries - 1
 * @length: bytes to mmap
 * @lock: guards @tail and @reserved, taken in interrupts
 * @tail: entries produced so far
 * @reserved: entries promised to work in flight
 *
 * Of what the program can write only peergate_ring.head is ever read, and it
 * decides nothing but how much room there is.
 */
struct pg_ring {
	struct peergate_ring *area;
	struct peergate_completion *entries;
	u32 mask;
	size_t length;
	spinlock_t lock;
	u32 tail;
	u32 reserved;
};

/**
 * struct pg_file - An open file: one domain.
 * @refs: see the top of this file
 * @dev: the device
 * @free_work: ends the file where sleeping is allowed
 * @node: in pg_device.stranded
 * @detach: the request that ends the domain, allocated ahead
 * @domain: its number, 0 before there is one
 * @session: in which the domain was created
 * @lock: guards what @ranges and @buffers point to
 * @ranges: &struct pg_range by I/O virtual address
 * @buffers: those of them that are buffers, by handle
 * @pinned: pages pinned
 * @ring: the completion ring, set once
 * @ring_wait: woken when the ring gets entries
 * @event_lock: guards @events and @events_dropped, taken in interrupts
 * @events: for read()
 * @events_dropped: events that found no room in @events
 * @event_wait: woken when @events gets one
 */
struct pg_file {
	struct kref refs;
	struct pg_device *dev;
	struct work_struct free_work;
	struct list_head node;
	struct pg_msg *detach;
	u32 domain;
	struct pg_session *session;

	struct mutex lock;
	struct maple_tree ranges;
	struct xarray buffers;
	atomic64_t pinned;

	struct pg_ring *ring;
	wait_queue_head_t ring_wait;

	spinlock_t event_lock;
	DECLARE_KFIFO_PTR(events, struct peergate_event);
	u64 events_dropped;
	wait_queue_head_t event_wait;
};

/**
 * struct pg_msg - A control request.
 * @node: in pg_device.backlog, or in a list of answered ones
 * @refs: one for who waits, one for the device; memory that the device may
 *	write is never freed under it, however the wait ends
 * @done: completed with the answer
 * @finish: called in process context with the answer, before @done
 * @owner: for @finish
 * @drain_ms: how much later than others it may be answered, since jobs must have
 *	ended
 * @error: 0 or negative errno, valid once done
 * @used: bytes of the answer that the device wrote
 * @out_len: bytes that the device reads
 * @in_len: bytes that the device may write
 * @in_min: bytes without which an OK answer is no answer
 * @data: the request, then the answer
 */
struct pg_msg {
	struct list_head node;
	refcount_t refs;
	struct completion done;
	void (*finish)(struct pg_msg *msg);
	void *owner;
	u32 drain_ms;
	int error;
	u32 used;
	u32 out_len;
	u32 in_len;
	u32 in_min;
	u8 data[] __aligned(8);
};

/**
 * struct pg_run - Pinned pages that lie side by side.
 * @page: the first
 * @count: how many
 */
struct pg_run {
	struct page *page;
	unsigned long count;
};

/**
 * struct pg_range - A range of I/O virtual addresses.
 * @file: whose
 * @base: first address reserved for it; it may begin later, aligned
 * @iova: first address; 0 before any is reserved
 * @length: bytes
 * @busy: being made or unmade; nobody else may unmap it. Guarded by
 *	pg_file.lock
 * @unmap: of pinned memory: the request that unmaps it, allocated ahead
 * @mm: of pinned memory: whose limit it counts against
 * @accounted: pages counted against it
 * @writable: pages are dirty when unpinned
 * @runs: the pinned pages
 * @run_count: entries of @runs in use
 * @run_room: entries of @runs
 */
struct pg_range {
	struct pg_file *file;
	unsigned long base;
	u64 iova;
	u64 length;
	bool busy;
	struct pg_msg *unmap;
	struct mm_struct *mm;
	unsigned long accounted;
	bool writable;
	struct pg_run *runs;
	size_t run_count;
	size_t run_room;
};

/* main.c */
extern struct workqueue_struct *pg_wq;
extern unsigned int pg_control_timeout_ms;

/* session.c */
int pg_introduce(struct pg_device *dev);
void pg_farewell(struct pg_device *dev);
int pg_probe_endpoints(struct pg_device *dev, u32 number, u32 room, struct pg_msg **reply);
struct pg_session *pg_session_get(struct pg_device *dev);
void pg_session_put(struct pg_session *session);
void pg_config_work(struct work_struct *work);
void pg_session_suspect(struct pg_device *dev);

/**
 * pg_is_live() - Whether the device takes requests.
 * @dev: the device
 *
 * Context: Any. Holds until rcu_read_unlock() if called under rcu_read_lock().
 * Return: whether it does.
 */
static inline bool pg_is_live(struct pg_device *dev)
{
	return READ_ONCE(dev->state) == PG_LIVE;
}

/**
 * pg_is_gone() - Whether the device was reset for good.
 * @dev: the device
 *
 * Context: Any.
 * Return: whether it was; what was in flight has completed then.
 */
static inline bool pg_is_gone(struct pg_device *dev)
{
	/* Pairs with the release in pg_control_drain(). */
	return smp_load_acquire(&dev->state) == PG_GONE;
}

/**
 * pg_queue_of() - The queue of a virtqueue.
 * @vq: the virtqueue
 *
 * Return: the queue.
 */
static inline struct pg_queue *pg_queue_of(struct virtqueue *vq)
{
	struct pg_device *dev = vq->vdev->priv;

	return &dev->queues[vq->index];
}

/* vq.c */
struct pg_msg *pg_msg_alloc(u16 opcode, u32 domain, u32 session, size_t body_len,
			    size_t reply_len);
void pg_msg_put(struct pg_msg *msg);
void pg_msg_send(struct pg_device *dev, struct pg_msg *msg);
int pg_msg_wait(struct pg_device *dev, struct pg_msg *msg);
int pg_request(struct pg_file *file, u16 opcode, const void *body, size_t body_len,
	       void *reply, size_t reply_len, bool drains);
void pg_control_done(struct virtqueue *vq);
void pg_control_work(struct work_struct *work);
void pg_control_drain(struct pg_device *dev);

/**
 * pg_msg_set_domain() - Say which domain a request is about.
 * @msg: the request, not sent
 * @domain: the domain
 */
static inline void pg_msg_set_domain(struct pg_msg *msg, u32 domain)
{
	((struct virtio_peergate_control *)msg->data)->domain = cpu_to_le32(domain);
}

/**
 * pg_msg_body() - Body of a request.
 * @msg: the request
 *
 * Return: what follows its header.
 */
static inline void *pg_msg_body(struct pg_msg *msg)
{
	return msg->data + sizeof(struct virtio_peergate_control);
}

/**
 * pg_msg_reply() - Answer of a request.
 * @msg: the request
 *
 * Return: the answer's header.
 */
static inline struct virtio_peergate_reply *pg_msg_reply(struct pg_msg *msg)
{
	return (struct virtio_peergate_reply *)(msg->data + msg->out_len);
}

/* file.c */
extern const struct file_operations pg_fops;

void pg_file_release(struct kref *refs);
void pg_files_rescue(struct pg_device *dev);

/**
 * pg_file_get() - Take a reference.
 * @file: the file
 */
static inline void pg_file_get(struct pg_file *file)
{
	kref_get(&file->refs);
}

/**
 * pg_file_put() - Give a reference back.
 * @file: the file
 *
 * Context: Any, interrupts too.
 */
static inline void pg_file_put(struct pg_file *file)
{
	kref_put(&file->refs, pg_file_release);
}

/* ioctl.c */
long pg_ioctl(struct file *filp, unsigned int cmd, unsigned long user);

/* range.c */
void pg_mem_init(struct pg_file *file);
void pg_mem_destroy(struct pg_file *file);
struct pg_range *pg_range_alloc(struct pg_file *file, u64 length);
void pg_range_free(struct pg_range *range);
int pg_range_reserve(struct pg_range *range, u64 align);
void pg_range_publish(struct pg_range *range);
void pg_range_drop(struct pg_range *range);
void pg_range_gone(struct pg_msg *msg);

/* mem.c */
int pg_map(struct pg_file *file, void *data);
void pg_map_undo(struct pg_file *file, void *data);
int pg_unmap(struct pg_file *file, void *data);

/* buffer.c */
int pg_alloc(struct pg_file *file, void *data);
void pg_alloc_undo(struct pg_file *file, void *data);
int pg_free(struct pg_file *file, void *data);

/* submit.c */
int pg_submit(struct pg_file *file, void *data);
void pg_submit_done(struct virtqueue *vq);
void pg_submit_drain(struct pg_queue *queue);

/* ring.c */
/**
 * pg_ring_of() - The completion ring of a file.
 * @file: the file
 *
 * Context: Any.
 * Return: the ring or NULL.
 */
static inline struct pg_ring *pg_ring_of(struct pg_file *file)
{
	/* Pairs with the cmpxchg() in pg_ring_setup(): the ring is complete. */
	return smp_load_acquire(&file->ring);
}

int pg_ring_setup(struct pg_file *file, void *data);
void pg_ring_destroy(struct pg_file *file);
u32 pg_ring_unread(struct pg_file *file);
u32 pg_ring_reserve(struct pg_ring *ring, u32 count);
void pg_ring_unreserve(struct pg_ring *ring, u32 count);
int pg_wait(struct pg_file *file, void *data);

/* event.c */
void pg_events_post(struct pg_device *dev);
void pg_event_done(struct virtqueue *vq);
bool pg_event_pop(struct pg_file *file, struct peergate_event *event);
bool pg_event_pending(struct pg_file *file);

#endif /* _PEERGATE_INTERNAL_H */
