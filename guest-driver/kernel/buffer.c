// SPDX-License-Identifier: GPL-2.0
/*
 * Peergate driver: buffers in memory of endpoints.
 *
 * ALLOC and FREE. The device says what a handle stands for; the driver remembers
 * only the addresses that go with it.
 */
#include <linux/mm.h>
#include <linux/slab.h>

#include "peergate_internal.h"

/**
 * pg_find_endpoint() - Find an endpoint by its number.
 * @session: the session
 * @endpoint: the number
 *
 * Return: the endpoint or NULL.
 */
static const struct peergate_endpoint *pg_find_endpoint(const struct pg_session *session,
							u32 endpoint)
{
	unsigned int i;

	for (i = 0; i < session->endpoint_count; i++)
		if (session->endpoints[i].endpoint == endpoint)
			return &session->endpoints[i];
	return NULL;
}

/**
 * pg_range_alloc_buffer() - Ask the device for a buffer.
 * @range: the range, with its addresses
 * @arg: argument of PEERGATE_ALLOC, with the length to ask for; gets handle and
 *	address
 *
 * Context: Process context, sleeps; a fatal signal ends the wait.
 * Return: 0 or negative errno. The range is not to be used after: another thread
 * may have freed the buffer already, and with an error that says that there is
 * none the range is dropped. With another error it stays until the file is closed.
 */
static int pg_range_alloc_buffer(struct pg_range *range, struct peergate_alloc *arg)
{
	struct virtio_peergate_alloc body = {
		.endpoint = cpu_to_le32(arg->endpoint),
		.flags = cpu_to_le32(arg->flags),
		.iova = cpu_to_le64(range->iova),
		.len = cpu_to_le64(arg->length),
	};
	struct virtio_peergate_alloc_reply reply;
	struct virtio_peergate_free free;
	struct pg_file *file = range->file;
	int ret;

	ret = pg_request(file, VIRTIO_PEERGATE_OP_ALLOC, &body, sizeof(body), &reply,
			 sizeof(reply), false);
	if (ret) {
		if (ret != -EINTR && ret != -ETIMEDOUT && ret != -EIO)
			pg_range_drop(range);
		return ret;
	}
	arg->handle = le64_to_cpu(reply.handle);
	arg->iova = range->iova;
	ret = xa_insert(&file->buffers, arg->handle, range, GFP_KERNEL_ACCOUNT);
	if (!ret)
		return 0;
	free.handle = reply.handle;
	if (!pg_request(file, VIRTIO_PEERGATE_OP_FREE, &free, sizeof(free), NULL, 0, true))
		pg_range_drop(range);
	return ret == -EBUSY ? -EIO : ret;
}

/**
 * pg_alloc() - PEERGATE_ALLOC.
 * @file: the file
 * @data: &struct peergate_alloc
 *
 * Flags are the device's to judge.
 *
 * Context: Process context, sleeps; a fatal signal ends the wait.
 * Return: 0 or negative errno, with nothing allocated.
 */
int pg_alloc(struct pg_file *file, void *data)
{
	const struct peergate_endpoint *endpoint;
	struct peergate_alloc *arg = data;
	struct pg_range *range;
	u64 granule, length;
	int ret;

	BUILD_BUG_ON(VIRTIO_PEERGATE_ALLOC_REGISTERS != PEERGATE_ALLOC_REGISTERS);
	if (arg->reserved)
		return -EINVAL;
	endpoint = pg_find_endpoint(file->session, arg->endpoint);
	if (!endpoint)
		return -ENOENT;
	if (arg->flags & PEERGATE_ALLOC_REGISTERS) {
		granule = PAGE_SIZE;
		if (!endpoint->registers_len)
			return -EOPNOTSUPP;
		if (!arg->length)
			arg->length = endpoint->registers_len;
	} else {
		granule = max_t(u64, endpoint->granularity, PAGE_SIZE);
	}
	if (!arg->length)
		return -EINVAL;
	length = ALIGN(arg->length, granule);
	if (length < arg->length)
		return -ERANGE;
	if (!(arg->flags & PEERGATE_ALLOC_REGISTERS))
		arg->length = length;

	range = pg_range_alloc(file, length);
	if (!range)
		return -ENOMEM;
	ret = pg_range_reserve(range, granule);
	if (ret) {
		pg_range_free(range);
		return ret;
	}
	return pg_range_alloc_buffer(range, arg);
}

/**
 * pg_free() - PEERGATE_FREE.
 * @file: the file
 * @data: &struct peergate_free
 *
 * A handle that is not a buffer of this file goes to the device too, which blames
 * the caller for it.
 *
 * Context: Process context, sleeps; a fatal signal ends the wait.
 * Return: 0 or negative errno.
 */
int pg_free(struct pg_file *file, void *data)
{
	struct peergate_free *arg = data;
	struct virtio_peergate_free *body;
	struct pg_range *range;
	struct pg_msg *msg;
	int ret;

	if (arg->flags)
		return -EINVAL;
	msg = pg_msg_alloc(VIRTIO_PEERGATE_OP_FREE, file->domain, file->session->number,
			   sizeof(*body), 0);
	if (!msg)
		return -ENOMEM;
	body = pg_msg_body(msg);
	body->handle = cpu_to_le64(arg->handle);
	msg->drain_ms = file->session->max_timeout_ms;
	range = xa_erase(&file->buffers, arg->handle);
	if (range) {
		msg->finish = pg_range_gone;
		msg->owner = range;
		pg_file_get(file);
	}
	pg_msg_send(file->dev, msg);
	ret = pg_msg_wait(file->dev, msg);
	pg_msg_put(msg);
	return ret;
}

/**
 * pg_alloc_undo() - Take a PEERGATE_ALLOC back.
 * @file: the file
 * @data: &struct peergate_alloc
 *
 * Context: Process context, sleeps; a fatal signal ends the wait.
 */
void pg_alloc_undo(struct pg_file *file, void *data)
{
	struct peergate_alloc *arg = data;
	struct peergate_free free = { .handle = arg->handle };

	pg_free(file, &free);
}
