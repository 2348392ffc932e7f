// SPDX-License-Identifier: GPL-2.0
/*
 * Peergate driver: sessions.
 *
 * HELLO and PROBE: the driver agrees with the device on a version, and asks for
 * limits and endpoints. When the device loses its state it says HELLO again;
 * files of the session before are of no more use then, new ones can be opened.
 */
#include <linux/log2.h>
#include <linux/slab.h>
#include <linux/virtio_config.h>

#include "peergate_internal.h"

/**
 * pg_hello_send() - Ask the device to forget every domain and begin a session.
 * @dev: the device
 *
 * Context: Process context, sleeps.
 * Return: the request, to be put by the caller, or NULL without memory.
 */
static struct pg_msg *pg_hello_send(struct pg_device *dev)
{
	struct virtio_peergate_hello *hello;
	struct pg_msg *msg;

	msg = pg_msg_alloc(VIRTIO_PEERGATE_OP_HELLO, 0, 0, sizeof(*hello),
			   sizeof(struct virtio_peergate_hello_reply));
	if (!msg)
		return NULL;
	hello = pg_msg_body(msg);
	hello->version = cpu_to_le16(VIRTIO_PEERGATE_VERSION);
	msg->drains = true;
	pg_msg_send(dev, msg);
	return msg;
}

/**
 * pg_hello() - Begin a session; the device forgets every domain.
 * @dev: the device
 *
 * Context: Process context, sleeps.
 * Return: 0 or negative errno.
 */
static int pg_hello(struct pg_device *dev)
{
	struct pg_msg *msg = pg_hello_send(dev);
	struct virtio_peergate_hello_reply *reply;
	int ret;

	if (!msg)
		return -ENOMEM;
	ret = pg_msg_wait(dev, msg);
	if (!ret) {
		pg_files_rescue(dev);
		reply = (struct virtio_peergate_hello_reply *)(pg_msg_reply(msg) + 1);
		if (le16_to_cpu(reply->version) != VIRTIO_PEERGATE_VERSION)
			ret = -EPROTO;
		dev->version = le16_to_cpu(reply->version);
		WRITE_ONCE(dev->session, le32_to_cpu(reply->session));
	}
	pg_msg_put(msg);
	return ret;
}

/**
 * pg_farewell() - Have the device end every domain, before it is reset.
 * @dev: the device, live
 *
 * A reset ends work that came through a queue. What an endpoint does of its own,
 * such as a kernel of an FPGA, ends with its domain only.
 *
 * Context: Process context, sleeps; a fatal signal ends the wait.
 */
void pg_farewell(struct pg_device *dev)
{
	struct pg_msg *msg;

	if (!atomic_read(&dev->domains))
		return;
	msg = pg_hello_send(dev);
	if (!msg || pg_msg_wait(dev, msg))
		dev_warn(&dev->dev, "device did not end its domains: it may still use their memory\n");
	if (msg)
		pg_msg_put(msg);
}

/**
 * pg_probe_limits() - Ask for limits and endpoints.
 * @dev: the device
 * @reply: the request with its answer, to be put by the caller, if 0 is returned
 *
 * Context: Process context, sleeps.
 * Return: 0 or negative errno.
 */
int pg_probe_limits(struct pg_device *dev, struct pg_msg **reply)
{
	size_t room = array_size(dev->endpoint_count, sizeof(struct virtio_peergate_endpoint));
	struct virtio_peergate_probe_reply *probe;
	struct pg_msg *msg;
	int ret;

	msg = pg_msg_alloc(VIRTIO_PEERGATE_OP_PROBE, 0, READ_ONCE(dev->session), 0,
			   sizeof(*probe) + room);
	if (!msg)
		return -ENOMEM;
	pg_msg_send(dev, msg);
	ret = pg_msg_wait(dev, msg);
	if (ret) {
		pg_msg_put(msg);
		return ret;
	}
	*reply = msg;
	return 0;
}

/**
 * pg_take_limits() - Check and keep what PROBE said.
 * @dev: the device
 * @probe: the answer
 *
 * Return: 0, or -EPROTO if the driver cannot work with it.
 */
static int pg_take_limits(struct pg_device *dev, const struct virtio_peergate_probe_reply *probe)
{
	u64 mask = le64_to_cpu(probe->page_size_mask);
	u64 start = max_t(u64, le64_to_cpu(probe->iova_start), PAGE_SIZE);

	if (!mask || BIT_ULL(__ffs64(mask)) > PAGE_SIZE) {
		dev_err(&dev->dev, "device maps in units larger than a page of %lu bytes\n",
			PAGE_SIZE);
		return -EPROTO;
	}
	dev->iova_start = ALIGN(start, PAGE_SIZE);
	dev->iova_last = le64_to_cpu(probe->iova_last);
	dev->max_domains = le32_to_cpu(probe->max_domains);
	dev->max_mappings = le32_to_cpu(probe->max_mappings);
	dev->max_segments = min(le32_to_cpu(probe->max_segments), PG_MAX_SEGMENTS);
	dev->stream_credits = le32_to_cpu(probe->stream_credits);
	dev->max_in_flight = le32_to_cpu(probe->max_in_flight);
	dev->max_streams = le32_to_cpu(probe->max_streams);
	dev->default_timeout_ms = le32_to_cpu(probe->default_timeout_ms);
	dev->max_timeout_ms = le32_to_cpu(probe->max_timeout_ms);
	dev->max_batch = min(le16_to_cpu(probe->max_batch), PG_MAX_BATCH);
	if (dev->iova_start < start || dev->iova_start > dev->iova_last || !dev->max_domains ||
	    dev->max_domains > INT_MAX || !dev->max_segments || !dev->max_batch) {
		dev_err(&dev->dev, "device offers no address, domain, segment or batch\n");
		return -EPROTO;
	}
	return 0;
}

/**
 * pg_take_endpoint() - Check and keep what PROBE said about an endpoint.
 * @dev: the device
 * @index: which one
 * @wire: the answer
 *
 * Return: 0, or -EPROTO if the driver cannot work with it.
 */
static int pg_take_endpoint(struct pg_device *dev, unsigned int index,
			    const struct virtio_peergate_endpoint *wire)
{
	struct peergate_endpoint *endpoint = &dev->endpoints[index];

	endpoint->index = index;
	endpoint->endpoint = le32_to_cpu(wire->endpoint);
	endpoint->kind = le16_to_cpu(wire->kind);
	endpoint->engines = le16_to_cpu(wire->engines);
	endpoint->memory_len = le64_to_cpu(wire->memory_len);
	endpoint->memory_free = le64_to_cpu(wire->memory_free);
	endpoint->registers_len = le64_to_cpu(wire->registers_len);
	endpoint->granularity = le64_to_cpu(wire->granularity);
	memcpy(endpoint->name, wire->name, sizeof(wire->name));
	if (!is_power_of_2(endpoint->granularity)) {
		dev_err(&dev->dev, "endpoint %u allocates in units of %llu bytes, not a power of two\n",
			endpoint->endpoint, endpoint->granularity);
		return -EPROTO;
	}
	return 0;
}

/**
 * pg_introduce() - HELLO and PROBE.
 * @dev: the device
 *
 * Context: Process context, sleeps.
 * Return: 0 or negative errno.
 */
int pg_introduce(struct pg_device *dev)
{
	const struct virtio_peergate_endpoint *endpoints;
	const struct virtio_peergate_probe_reply *probe;
	struct pg_msg *msg;
	unsigned int i;
	int ret;

	ret = pg_hello(dev);
	if (ret) {
		dev_err(&dev->dev, "HELLO failed: %d\n", ret);
		return ret;
	}
	ret = pg_probe_limits(dev, &msg);
	if (ret) {
		dev_err(&dev->dev, "PROBE failed: %d\n", ret);
		return ret;
	}
	probe = (const void *)(pg_msg_reply(msg) + 1);
	endpoints = (const void *)(probe + 1);
	ret = pg_take_limits(dev, probe);
	for (i = 0; !ret && i < dev->endpoint_count; i++)
		ret = pg_take_endpoint(dev, i, &endpoints[i]);
	pg_msg_put(msg);
	return ret;
}

/**
 * pg_config_work() - The device may have lost its state.
 * @work: pg_device.config_work
 *
 * Context: Process context, sleeps. pg_stop() waits for it, so the virtio device
 * stays.
 */
void pg_config_work(struct work_struct *work)
{
	struct pg_device *dev = container_of(work, struct pg_device, config_work);
	u32 session;
	int ret;

	if (!pg_is_live(dev))
		return;
	virtio_cread_le(dev->vdev, struct virtio_peergate_config, session, &session);
	if (session == dev->session)
		return;
	ret = pg_hello(dev);
	if (ret)
		dev_err(&dev->dev, "device lost its state, and HELLO failed: %d\n", ret);
	else
		dev_warn(&dev->dev, "device lost its state: session %u begins\n", dev->session);
}

/**
 * pg_session_suspect() - Have it looked whether a new session began.
 * @dev: the device
 *
 * Context: Any. pg_config_work() does it.
 */
void pg_session_suspect(struct pg_device *dev)
{
	rcu_read_lock();
	if (pg_is_live(dev))
		queue_work(pg_wq, &dev->config_work);
	rcu_read_unlock();
}
