// SPDX-License-Identifier: GPL-2.0
/*
 * Peergate driver: the ioctls of /dev/peergateN.
 *
 * One table says which there are. Each takes a structure that starts with its
 * size; what is not here is in the file of its object.
 */
#include <linux/fs.h>
#include <linux/mm.h>
#include <linux/nospec.h>
#include <linux/uaccess.h>

#include "peergate_internal.h"

/**
 * pg_info() - PEERGATE_INFO.
 * @file: the file
 * @data: &struct peergate_info
 *
 * Return: 0 or -EINVAL.
 */
static int pg_info(struct pg_file *file, void *data)
{
	const struct pg_session *session = file->session;
	struct pg_device *dev = file->dev;
	struct peergate_info *info = data;

	if (info->flags)
		return -EINVAL;
	*info = (struct peergate_info) {
		.size = info->size,
		.version = session->version,
		.session = session->number,
		.domain = file->domain,
		.interrupt = dev->interrupt,
		.iova_start = session->iova_start,
		.iova_last = session->iova_last,
		.page_size = PAGE_SIZE,
		.max_batch = session->max_batch,
		.endpoints = session->endpoint_count,
		.stream_credits = session->stream_credits,
		.max_in_flight = session->max_in_flight,
		.max_streams = session->max_streams,
		.default_timeout_ms = session->default_timeout_ms,
		.max_timeout_ms = session->max_timeout_ms,
		.submit_queues = dev->queue_count - VIRTIO_PEERGATE_VQ_SUBMIT,
		.pinned_bytes = (u64)atomic64_read(&file->pinned) << PAGE_SHIFT,
		.max_domains = session->max_domains,
		.max_mappings = session->max_mappings,
	};
	return 0;
}

/**
 * pg_endpoint() - PEERGATE_ENDPOINT.
 * @file: the file
 * @data: &struct peergate_endpoint
 *
 * Context: Process context, sleeps.
 * Return: 0 or negative errno.
 */
static int pg_endpoint(struct pg_file *file, void *data)
{
	const struct virtio_peergate_probe_reply *probe;
	const struct virtio_peergate_endpoint *wire;
	const struct pg_session *session = file->session;
	struct peergate_endpoint *arg = data;
	u32 count = session->endpoint_count;
	u32 size = arg->size;
	struct pg_msg *msg;
	int ret;

	if (arg->index >= count)
		return -ENOENT;
	*arg = session->endpoints[array_index_nospec(arg->index, count)];
	arg->size = size;
	ret = pg_probe_endpoints(file->dev, session->number, count, &msg);
	if (ret)
		return ret;
	probe = (const void *)(pg_msg_reply(msg) + 1);
	wire = (const struct virtio_peergate_endpoint *)(probe + 1) + arg->index;
	arg->memory_free = le64_to_cpu(wire->memory_free);
	pg_msg_put(msg);
	return 0;
}

/**
 * pg_peer() - PEERGATE_PEER.
 * @file: the file
 * @data: &struct peergate_peer
 *
 * Context: Process context, sleeps.
 * Return: 0 or negative errno.
 */
static int pg_peer(struct pg_file *file, void *data)
{
	static const u16 opcodes[] = {
		[PEERGATE_PEER_ENABLE] = VIRTIO_PEERGATE_OP_PEER_ENABLE,
		[PEERGATE_PEER_DISABLE] = VIRTIO_PEERGATE_OP_PEER_DISABLE,
		[PEERGATE_PEER_QUERY] = VIRTIO_PEERGATE_OP_PEER_QUERY,
	};
	struct peergate_peer *arg = data;
	struct virtio_peergate_peer body = {
		.accessor = cpu_to_le32(arg->accessor),
		.owner = cpu_to_le32(arg->owner),
		.rights = cpu_to_le32(arg->op == PEERGATE_PEER_QUERY ? 0 : arg->rights),
	};
	struct virtio_peergate_peer_reply reply;
	int ret;

	if (arg->op >= ARRAY_SIZE(opcodes) || !opcodes[arg->op])
		return -EOPNOTSUPP;
	ret = pg_request(file, opcodes[arg->op], &body, sizeof(body), &reply, sizeof(reply),
			 arg->op == PEERGATE_PEER_DISABLE);
	if (ret)
		return ret;
	arg->rights = le32_to_cpu(reply.rights);
	arg->path = le16_to_cpu(reply.path);
	arg->reason = le16_to_cpu(reply.reason);
	return 0;
}

/**
 * pg_stream_reset() - Clear a stream's error.
 * @file: the file
 * @arg: argument of PEERGATE_STREAM
 *
 * Context: Process context, sleeps.
 * Return: 0 or negative errno.
 */
static int pg_stream_reset(struct pg_file *file, struct peergate_stream *arg)
{
	struct virtio_peergate_stream_reset body = {
		.stream = cpu_to_le32(arg->stream),
	};

	if (arg->flags || arg->cookie)
		return -EINVAL;
	arg->cancelled = 0;
	arg->running = 0;
	return pg_request(file, VIRTIO_PEERGATE_OP_STREAM_RESET, &body, sizeof(body), NULL, 0,
			  false);
}

/**
 * pg_stream_cancel() - Cancel work.
 * @file: the file
 * @arg: argument of PEERGATE_STREAM
 *
 * Context: Process context, sleeps.
 * Return: 0 or negative errno.
 */
static int pg_stream_cancel(struct pg_file *file, struct peergate_stream *arg)
{
	bool all = arg->flags & PEERGATE_CANCEL_ALL;
	struct virtio_peergate_cancel body = {
		.stream = cpu_to_le32(arg->stream),
		.flags = cpu_to_le32(all ? VIRTIO_PEERGATE_CANCEL_STREAM : 0),
		.cookie = cpu_to_le64(arg->cookie),
	};
	struct virtio_peergate_cancel_reply reply;
	int ret;

	if (arg->flags & ~PEERGATE_CANCEL_ALL)
		return -EINVAL;
	ret = pg_request(file, VIRTIO_PEERGATE_OP_CANCEL, &body, sizeof(body), &reply,
			 sizeof(reply), false);
	if (ret)
		return ret;
	arg->cancelled = le32_to_cpu(reply.cancelled);
	arg->running = le32_to_cpu(reply.running);
	return 0;
}

/**
 * pg_stream() - PEERGATE_STREAM.
 * @file: the file
 * @data: &struct peergate_stream
 *
 * Context: Process context, sleeps.
 * Return: 0 or negative errno.
 */
static int pg_stream(struct pg_file *file, void *data)
{
	struct peergate_stream *arg = data;

	switch (arg->op) {
	case PEERGATE_STREAM_RESET:
		return pg_stream_reset(file, arg);
	case PEERGATE_STREAM_CANCEL:
		return pg_stream_cancel(file, arg);
	default:
		return -EOPNOTSUPP;
	}
}

/* Argument of any ioctl. */
union pg_arg {
	__u32 size;
	struct peergate_info info;
	struct peergate_endpoint endpoint;
	struct peergate_ring_setup ring;
	struct peergate_map map;
	struct peergate_unmap unmap;
	struct peergate_alloc alloc;
	struct peergate_free free;
	struct peergate_peer peer;
	struct peergate_submit submit;
	struct peergate_wait wait;
	struct peergate_stream stream;
};

/**
 * struct pg_op - An ioctl.
 * @cmd: its number; a program may have a structure of another size
 * @size: size of the structure that this kernel knows
 * @min_size: size of the oldest structure
 * @fn: what it does, with a pointer to the structure
 * @undo: takes back what @fn did when the caller cannot be told, or NULL
 */
struct pg_op {
	unsigned int cmd;
	u16 size;
	u16 min_size;
	int (*fn)(struct pg_file *file, void *arg);
	void (*undo)(struct pg_file *file, void *arg);
};

#define PG_OP(_cmd, _type, _last, _fn, _undo)			\
	[_IOC_NR(_cmd)] = {					\
		.cmd = (_cmd),					\
		.size = sizeof(_type),				\
		.min_size = offsetofend(_type, _last),		\
		.fn = (_fn),					\
		.undo = (_undo),				\
	}

static const struct pg_op pg_ops[] = {
	PG_OP(PEERGATE_INFO, struct peergate_info, max_mappings, pg_info, NULL),
	PG_OP(PEERGATE_ENDPOINT, struct peergate_endpoint, name, pg_endpoint, NULL),
	PG_OP(PEERGATE_RING, struct peergate_ring_setup, length, pg_ring_setup, NULL),
	PG_OP(PEERGATE_MAP, struct peergate_map, iova, pg_map, pg_map_undo),
	PG_OP(PEERGATE_UNMAP, struct peergate_unmap, length, pg_unmap, NULL),
	PG_OP(PEERGATE_ALLOC, struct peergate_alloc, iova, pg_alloc, pg_alloc_undo),
	PG_OP(PEERGATE_FREE, struct peergate_free, handle, pg_free, NULL),
	PG_OP(PEERGATE_PEER, struct peergate_peer, reason, pg_peer, NULL),
	PG_OP(PEERGATE_SUBMIT, struct peergate_submit, queue, pg_submit, NULL),
	PG_OP(PEERGATE_WAIT, struct peergate_wait, deadline_ns, pg_wait, NULL),
	PG_OP(PEERGATE_STREAM, struct peergate_stream, running, pg_stream, NULL),
};

/**
 * pg_find_op() - Find an ioctl.
 * @cmd: its number, with the size of the caller's structure
 *
 * Return: the ioctl, or NULL.
 */
static const struct pg_op *pg_find_op(unsigned int cmd)
{
	const struct pg_op *op;

	if (_IOC_NR(cmd) >= ARRAY_SIZE(pg_ops))
		return NULL;
	op = &pg_ops[array_index_nospec(_IOC_NR(cmd), ARRAY_SIZE(pg_ops))];
	return op->fn && (op->cmd & ~IOCSIZE_MASK) == (cmd & ~IOCSIZE_MASK) ? op : NULL;
}

/**
 * pg_ioctl() - An ioctl.
 * @filp: the file
 * @cmd: which one
 * @user: pointer to its structure
 *
 * Context: Process context, sleeps.
 * Return: 0 or negative errno.
 */
long pg_ioctl(struct file *filp, unsigned int cmd, unsigned long user)
{
	const struct pg_op *op = pg_find_op(cmd);
	struct pg_file *file = filp->private_data;
	void __user *uarg = (void __user *)user;
	union pg_arg arg = {};
	u32 size;
	int ret;

	if (!op)
		return -ENOTTY;
	if (!pg_is_live(file->dev) && op->fn != pg_wait)
		return -ENODEV;
	if (get_user(size, (u32 __user *)uarg))
		return -EFAULT;
	if (size < op->min_size)
		return -EINVAL;
	if (size > PAGE_SIZE)
		return -E2BIG;
	ret = copy_struct_from_user(&arg, op->size, uarg, size);
	if (ret)
		return ret;
	arg.size = size;
	ret = op->fn(file, &arg);
	if (ret || !(_IOC_DIR(op->cmd) & _IOC_READ))
		return ret;
	if (copy_to_user(uarg, &arg, min_t(u32, size, op->size))) {
		if (op->undo)
			op->undo(file, &arg);
		return -EFAULT;
	}
	return 0;
}
