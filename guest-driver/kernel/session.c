// SPDX-License-Identifier: GPL-2.0
/*
 * Peergate driver: sessions.
 *
 * HELLO and PROBE: the driver agrees with the device on a version, and asks for
 * limits and endpoints. When the device loses its state it does so again, and
 * once more if the state is lost meanwhile; files of the session before are of no
 * more use then, new ones belong to the new one.
 */
#include <linux/log2.h>
#include <linux/slab.h>
#include <linux/virtio_config.h>

#include "peergate_internal.h"

/*
 * How often a session may be lost while it begins until the next open or the next
 * change of configuration space is waited for.
 */
#define PG_SESSION_TRIES	16

/**
 * pg_session_get() - The session in force.
 * @dev: the device, introduced
 *
 * Context: Process context. Takes pg_device.session_lock.
 * Return: the session, to be put by the caller.
 */
struct pg_session *pg_session_get(struct pg_device *dev)
{
	struct pg_session *session;

	spin_lock(&dev->session_lock);
	session = dev->session;
	refcount_inc(&session->refs);
	spin_unlock(&dev->session_lock);
	return session;
}

/**
 * pg_session_put() - Give a reference back.
 * @session: the session
 *
 * Context: Process context.
 */
void pg_session_put(struct pg_session *session)
{
	if (refcount_dec_and_test(&session->refs))
		kfree(session);
}

/**
 * pg_session_replace() - Another session is in force.
 * @dev: the device
 * @session: the session; its reference goes to the device
 *
 * Context: Process context. Takes pg_device.session_lock.
 */
static void pg_session_replace(struct pg_device *dev, struct pg_session *session)
{
	struct pg_session *before;

	spin_lock(&dev->session_lock);
	before = dev->session;
	dev->session = session;
	spin_unlock(&dev->session_lock);
	if (before)
		pg_session_put(before);
}

/**
 * pg_hello_send() - Ask the device to forget every domain and begin a session.
 * @dev: the device
 * @drain_ms: deadline of the longest job that it may have
 *
 * Context: Process context, sleeps.
 * Return: the request, to be put by the caller, or NULL without memory.
 */
static struct pg_msg *pg_hello_send(struct pg_device *dev, u32 drain_ms)
{
	struct virtio_peergate_hello *hello;
	struct pg_msg *msg;

	msg = pg_msg_alloc(VIRTIO_PEERGATE_OP_HELLO, 0, 0, sizeof(*hello),
			   sizeof(struct virtio_peergate_hello_reply));
	if (!msg)
		return NULL;
	hello = pg_msg_body(msg);
	hello->version = cpu_to_le16(VIRTIO_PEERGATE_VERSION);
	msg->drain_ms = drain_ms;
	pg_msg_send(dev, msg);
	return msg;
}

/**
 * pg_hello() - Begin a session; the device forgets every domain.
 * @dev: the device
 * @hello: gets the answer
 *
 * Context: Process context, sleeps.
 * Return: 0 or negative errno.
 */
static int pg_hello(struct pg_device *dev, struct virtio_peergate_hello_reply *hello)
{
	/* Of a driver before this one nothing is known, and that it was reset. */
	struct pg_msg *msg = pg_hello_send(dev, dev->session ? dev->session->max_timeout_ms : 0);
	int ret;

	if (!msg)
		return -ENOMEM;
	ret = pg_msg_wait(dev, msg);
	if (!ret) {
		pg_files_rescue(dev);
		memcpy(hello, pg_msg_reply(msg) + 1, sizeof(*hello));
		if (le16_to_cpu(hello->version) != VIRTIO_PEERGATE_VERSION)
			ret = -EPROTO;
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
	struct pg_session *session = pg_session_get(dev);
	struct pg_msg *msg;

	if (atomic_read(&session->domains)) {
		msg = pg_hello_send(dev, session->max_timeout_ms);
		if (!msg || pg_msg_wait(dev, msg))
			dev_warn(&dev->dev, "device did not end its domains: it may still use their memory\n");
		if (msg)
			pg_msg_put(msg);
	}
	pg_session_put(session);
}

/**
 * pg_probe_endpoints() - Ask for limits and endpoints.
 * @dev: the device
 * @number: session that they are to be of
 * @room: for how many endpoints there is to be room
 * @reply: the request with its answer, to be put by the caller, if 0 is returned;
 *	it has all endpoints that it counts
 *
 * Context: Process context, sleeps.
 * Return: 0 or negative errno, -ESTALE if it is another session by now.
 */
int pg_probe_endpoints(struct pg_device *dev, u32 number, u32 room, struct pg_msg **reply)
{
	size_t size = array_size(room, sizeof(struct virtio_peergate_endpoint));
	const struct virtio_peergate_probe_reply *probe;
	struct pg_msg *msg;
	u16 count;
	int ret;

	msg = pg_msg_alloc(VIRTIO_PEERGATE_OP_PROBE, 0, number, 0, sizeof(*probe) + size);
	if (!msg)
		return -ENOMEM;
	msg->in_min -= size;
	pg_msg_send(dev, msg);
	ret = pg_msg_wait(dev, msg);
	if (!ret) {
		probe = (const void *)(pg_msg_reply(msg) + 1);
		count = le16_to_cpu(probe->endpoint_count);
		if (!count || count > room ||
		    msg->used < msg->in_min + count * sizeof(struct virtio_peergate_endpoint)) {
			dev_err_ratelimited(&dev->dev, "device told of %u endpoints in %u bytes; 1 to %u can be used\n",
					    count, msg->used, room);
			ret = -EPROTO;
		}
	}
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
 * @session: where to
 * @probe: the answer
 *
 * Return: 0, or -EPROTO if the driver cannot work with it.
 */
static int pg_take_limits(struct pg_device *dev, struct pg_session *session,
			  const struct virtio_peergate_probe_reply *probe)
{
	u64 mask = le64_to_cpu(probe->page_size_mask);
	u64 start = max_t(u64, le64_to_cpu(probe->iova_start), PAGE_SIZE);

	if (!mask || BIT_ULL(__ffs64(mask)) > PAGE_SIZE) {
		dev_err(&dev->dev, "device maps in units larger than a page of %lu bytes\n",
			PAGE_SIZE);
		return -EPROTO;
	}
	session->iova_start = ALIGN(start, PAGE_SIZE);
	session->iova_last = le64_to_cpu(probe->iova_last);
	session->max_domains = le32_to_cpu(probe->max_domains);
	session->max_mappings = le32_to_cpu(probe->max_mappings);
	session->max_segments = min(le32_to_cpu(probe->max_segments), PG_MAX_SEGMENTS);
	session->stream_credits = le32_to_cpu(probe->stream_credits);
	session->max_in_flight = le32_to_cpu(probe->max_in_flight);
	session->max_streams = le32_to_cpu(probe->max_streams);
	session->default_timeout_ms = le32_to_cpu(probe->default_timeout_ms);
	session->max_timeout_ms = le32_to_cpu(probe->max_timeout_ms);
	session->max_batch = min(le16_to_cpu(probe->max_batch), PG_MAX_BATCH);
	if (session->iova_start < start || session->iova_start > session->iova_last ||
	    !session->max_domains || session->max_domains > INT_MAX || !session->max_segments ||
	    !session->max_batch) {
		dev_err(&dev->dev, "device offers no address, domain, segment or batch\n");
		return -EPROTO;
	}
	return 0;
}

/**
 * pg_take_endpoint() - Check and keep what PROBE said about an endpoint.
 * @dev: the device
 * @session: where to
 * @wire: the answer
 *
 * Return: 0, or -EPROTO if the driver cannot work with it.
 */
static int pg_take_endpoint(struct pg_device *dev, struct pg_session *session,
			    const struct virtio_peergate_endpoint *wire)
{
	struct peergate_endpoint *endpoint = &session->endpoints[session->endpoint_count];

	endpoint->index = session->endpoint_count++;
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
 * pg_session_make() - Make the object of a session.
 * @dev: the device
 * @hello: what HELLO was answered
 * @probe: what PROBE was answered, with all endpoints behind it
 *
 * Context: Process context, sleeps.
 * Return: the object or an error pointer.
 */
static struct pg_session *pg_session_make(struct pg_device *dev,
					  const struct virtio_peergate_hello_reply *hello,
					  const struct virtio_peergate_probe_reply *probe)
{
	const struct virtio_peergate_endpoint *endpoints = (const void *)(probe + 1);
	u16 i, count = le16_to_cpu(probe->endpoint_count);
	struct pg_session *session;
	int ret;

	session = kzalloc(struct_size(session, endpoints, count), GFP_KERNEL);
	if (!session)
		return ERR_PTR(-ENOMEM);
	refcount_set(&session->refs, 1);
	session->number = le32_to_cpu(hello->session);
	session->version = le16_to_cpu(hello->version);
	ret = pg_take_limits(dev, session, probe);
	for (i = 0; !ret && i < count; i++)
		ret = pg_take_endpoint(dev, session, &endpoints[i]);
	if (ret) {
		pg_session_put(session);
		return ERR_PTR(ret);
	}
	return session;
}

/**
 * pg_session_begin() - HELLO and PROBE, once.
 * @dev: the device
 *
 * Context: Process context, sleeps.
 * Return: 0 with another session in force, or negative errno with that of before,
 * -ESTALE if the device lost its state meanwhile.
 */
static int pg_session_begin(struct pg_device *dev)
{
	struct virtio_peergate_hello_reply hello;
	struct pg_session *session;
	struct pg_msg *msg;
	int ret;

	ret = pg_hello(dev, &hello);
	if (ret)
		return ret;
	ret = pg_probe_endpoints(dev, le32_to_cpu(hello.session), PG_MAX_ENDPOINTS, &msg);
	if (ret)
		return ret;
	session = pg_session_make(dev, &hello, (const void *)(pg_msg_reply(msg) + 1));
	pg_msg_put(msg);
	if (IS_ERR(session))
		return PTR_ERR(session);
	pg_session_replace(dev, session);
	return 0;
}

/**
 * pg_introduce() - Begin a session.
 * @dev: the device
 *
 * One that is lost before it has begun is followed by the next: each try that
 * ends so was answered by a device that came up again.
 *
 * Context: Process context, sleeps. Called by probe, and then by pg_config_work()
 * only, so never twice at a time.
 * Return: 0 or negative errno; the reason is logged.
 */
int pg_introduce(struct pg_device *dev)
{
	unsigned int tries = PG_SESSION_TRIES;
	int ret;

	do {
		ret = pg_session_begin(dev);
	} while (ret == -ESTALE && --tries);
	if (ret)
		dev_err(&dev->dev, "cannot begin a session, HELLO or PROBE failed: %d\n", ret);
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
	u32 number;

	if (!pg_is_live(dev))
		return;
	virtio_cread_le(dev->vdev, struct virtio_peergate_config, session, &number);
	if (number == dev->session->number)
		return;
	if (!pg_introduce(dev))
		dev_warn(&dev->dev, "device lost its state: session %u begins, with %u endpoints\n",
			 dev->session->number, dev->session->endpoint_count);
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
