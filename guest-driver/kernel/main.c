// SPDX-License-Identifier: GPL-2.0
/*
 * Peergate driver: the virtio driver.
 *
 * Finds the device, agrees with it on a version, asks for its limits and shows
 * it as /dev/peergateN. Takes it away again at any time, with files open and
 * work in flight. Does not suspend: domains and pinned memory cannot follow a
 * device that loses its state.
 */
#include <linux/cc_platform.h>
#include <linux/idr.h>
#include <linux/module.h>
#include <linux/pci.h>
#include <linux/slab.h>
#include <linux/virtio_config.h>
#include <linux/virtio_ring.h>

#include "peergate_internal.h"

#define PG_MINORS	256

static unsigned int device_id = VIRTIO_ID_PEERGATE;
module_param(device_id, uint, 0444);
MODULE_PARM_DESC(device_id, "virtio device id to look for (default 37)");

unsigned int pg_control_timeout_ms = 30000;
module_param_named(control_timeout_ms, pg_control_timeout_ms, uint, 0644);
MODULE_PARM_DESC(control_timeout_ms,
		 "how long a caller waits for the device to answer a request, in ms; to what waits for transfers the device's longest deadline is added (default 30000)");

struct workqueue_struct *pg_wq;

static DEFINE_IDA(pg_minors);
static dev_t pg_devt;

/* Not const: before 6.4 the kernel keeps what it needs in here. */
static struct class pg_class = {
	.name = "peergate",
};

/**
 * pg_device_release() - The last user of a device is gone.
 * @dev: pg_device.dev
 *
 * Context: Process context.
 */
static void pg_device_release(struct device *dev)
{
	struct pg_device *pg = container_of(dev, struct pg_device, dev);

	xa_destroy(&pg->files);
	if (pg->session)
		pg_session_put(pg->session);
	kfree(pg->events);
	kfree(pg->queues);
	kfree(pg);
}

/**
 * pg_device_put() - Give a device's number back, and the probe's reference.
 * @dev: the device, not to be found by its number any more
 *
 * Files that are still open keep the object, but not the number: the device may
 * come back under its name.
 *
 * Context: Process context.
 */
static void pg_device_put(struct pg_device *dev)
{
	ida_free(&pg_minors, MINOR(dev->dev.devt));
	put_device(&dev->dev);
}

/**
 * pg_config_changed() - The device changed its configuration space.
 * @vdev: the virtio device
 *
 * Context: Interrupt.
 */
static void pg_config_changed(struct virtio_device *vdev)
{
	pg_session_suspect(vdev->priv);
}

/**
 * pg_interrupt_kind() - Which interrupts the transport found.
 * @vdev: the virtio device, with its queues
 *
 * Return: PEERGATE_INTERRUPT_*.
 */
static u32 pg_interrupt_kind(struct virtio_device *vdev)
{
	struct device *parent = vdev->dev.parent;

	if (parent && dev_is_pci(parent) && to_pci_dev(parent)->msix_enabled)
		return PEERGATE_INTERRUPT_MSIX;
	return PEERGATE_INTERRUPT_INTX;
}

/**
 * pg_check() - Whether this is a device for this driver.
 * @vdev: the virtio device
 * @config: its configuration space, read if 0 is returned
 *
 * Context: Process context.
 * Return: 0 or -ENODEV; the reason is logged.
 */
static int pg_check(struct virtio_device *vdev, struct virtio_peergate_config *config)
{
	u16 version, version_min;

	if (!vdev->config->get) {
		dev_err(&vdev->dev, "no configuration space\n");
		return -ENODEV;
	}
	virtio_cread_bytes(vdev, 0, config, sizeof(*config));
	if (memcmp(config->magic, VIRTIO_PEERGATE_MAGIC, sizeof(config->magic))) {
		dev_err(&vdev->dev, "not a Peergate device: configuration space starts with %8ph\n",
			config->magic);
		return -ENODEV;
	}
	if (!virtio_has_feature(vdev, VIRTIO_F_VERSION_1)) {
		dev_err(&vdev->dev, "device does not offer VERSION_1\n");
		return -ENODEV;
	}
	if (!virtio_has_feature(vdev, VIRTIO_RING_F_INDIRECT_DESC)) {
		dev_err(&vdev->dev, "device does not offer INDIRECT_DESC\n");
		return -ENODEV;
	}
	if (virtio_has_feature(vdev, VIRTIO_F_ACCESS_PLATFORM)) {
		dev_err(&vdev->dev,
			"device wants translated addresses (ACCESS_PLATFORM); turn iommu_platform off\n");
		return -ENODEV;
	}
	if (cc_platform_has(CC_ATTR_GUEST_MEM_ENCRYPT)) {
		dev_err(&vdev->dev, "memory of this guest is encrypted: the device cannot read it\n");
		return -ENODEV;
	}
	version = le16_to_cpu(config->version);
	version_min = le16_to_cpu(config->version_min);
	if (version < VIRTIO_PEERGATE_VERSION || version_min > VIRTIO_PEERGATE_VERSION) {
		dev_err(&vdev->dev, "device speaks versions %u to %u, this driver %u\n",
			version_min, version, VIRTIO_PEERGATE_VERSION);
		return -ENODEV;
	}
	if (!config->submit_queues || le16_to_cpu(config->submit_queues) > PG_MAX_QUEUES ||
	    !config->endpoints || le16_to_cpu(config->endpoints) > PG_MAX_ENDPOINTS) {
		dev_err(&vdev->dev, "device has %u submission queues and %u endpoints; 1 to %u and 1 to %u can be used\n",
			le16_to_cpu(config->submit_queues), le16_to_cpu(config->endpoints),
			PG_MAX_QUEUES, PG_MAX_ENDPOINTS);
		return -ENODEV;
	}
	return 0;
}

/**
 * pg_find_queues() - Set up the virtqueues.
 * @dev: the device
 *
 * Context: Process context, sleeps.
 * Return: 0 or negative errno; the reason is logged.
 */
static int pg_find_queues(struct pg_device *dev)
{
	struct virtqueue_info *info;
	struct virtqueue **vqs;
	unsigned int i;
	int ret = -ENOMEM;

	info = kzalloc_objs(*info, dev->queue_count);
	vqs = kzalloc_objs(*vqs, dev->queue_count);
	if (!info || !vqs)
		goto out;
	for (i = 0; i < dev->queue_count; i++) {
		info[i].name = "submit";
		info[i].callback = pg_submit_done;
	}
	info[VIRTIO_PEERGATE_VQ_CONTROL].name = "control";
	info[VIRTIO_PEERGATE_VQ_CONTROL].callback = pg_control_done;
	info[VIRTIO_PEERGATE_VQ_EVENT].name = "event";
	info[VIRTIO_PEERGATE_VQ_EVENT].callback = pg_event_done;

	ret = virtio_find_vqs(dev->vdev, dev->queue_count, vqs, info, NULL);
	if (ret) {
		dev_err(&dev->vdev->dev, "cannot set up %u queues (does the VMM provide as many?): %d\n",
			dev->queue_count, ret);
		goto out;
	}
	for (i = 0; i < dev->queue_count; i++)
		dev->queues[i].vq = vqs[i];
out:
	kfree(vqs);
	kfree(info);
	return ret;
}

/**
 * pg_device_alloc() - Make the object of a device.
 * @vdev: the virtio device
 * @config: its configuration space
 *
 * Context: Process context, sleeps.
 * Return: the object, or an error pointer.
 */
static struct pg_device *pg_device_alloc(struct virtio_device *vdev,
					 const struct virtio_peergate_config *config)
{
	struct pg_device *dev;
	unsigned int i;
	int minor, ret;

	dev = kzalloc_obj(*dev);
	if (!dev)
		return ERR_PTR(-ENOMEM);
	minor = ida_alloc_max(&pg_minors, PG_MINORS - 1, GFP_KERNEL);
	if (minor < 0) {
		kfree(dev);
		return ERR_PTR(minor);
	}
	device_initialize(&dev->dev);
	dev->dev.class = &pg_class;
	dev->dev.parent = &vdev->dev;
	dev->dev.devt = MKDEV(MAJOR(pg_devt), minor);
	dev->dev.release = pg_device_release;
	xa_init_flags(&dev->files, XA_FLAGS_ALLOC1 | XA_FLAGS_LOCK_IRQ);

	dev->vdev = vdev;
	dev->queue_count = VIRTIO_PEERGATE_VQ_SUBMIT + le16_to_cpu(config->submit_queues);
	INIT_LIST_HEAD(&dev->backlog);
	INIT_LIST_HEAD(&dev->stranded);
	INIT_DELAYED_WORK(&dev->control_work, pg_control_work);
	INIT_WORK(&dev->config_work, pg_config_work);
	init_waitqueue_head(&dev->domain_wait);
	spin_lock_init(&dev->session_lock);

	ret = dev_set_name(&dev->dev, "peergate%d", minor);
	if (ret)
		goto err_put;
	ret = -ENOMEM;
	dev->queues = kzalloc_objs(*dev->queues, dev->queue_count);
	dev->events = kzalloc_objs(*dev->events, PG_EVENT_BUFFERS);
	if (!dev->queues || !dev->events)
		goto err_put;
	for (i = 0; i < dev->queue_count; i++) {
		dev->queues[i].dev = dev;
		spin_lock_init(&dev->queues[i].lock);
	}
	return dev;

err_put:
	pg_device_put(dev);
	return ERR_PTR(ret);
}

/**
 * pg_wake_all() - Wake everyone who waits, so that they see that the device goes.
 * @dev: the device
 *
 * Context: Process context.
 */
static void pg_wake_all(struct pg_device *dev)
{
	struct pg_file *file;
	unsigned long index;

	wake_up_all(&dev->domain_wait);
	xa_lock_irq(&dev->files);
	xa_for_each(&dev->files, index, file) {
		wake_up_all(&file->event_wait);
		wake_up_all(&file->ring_wait);
	}
	xa_unlock_irq(&dev->files);
}

/**
 * pg_stop() - Reset the device and end everything that it had.
 * @dev: the device; gone from here on
 *
 * Context: Process context, sleeps.
 */
static void pg_stop(struct pg_device *dev)
{
	unsigned int i;

	WRITE_ONCE(dev->state, PG_DYING);
	synchronize_rcu();

	virtio_reset_device(dev->vdev);
	for (i = VIRTIO_PEERGATE_VQ_SUBMIT; i < dev->queue_count; i++)
		pg_submit_drain(&dev->queues[i]);
	pg_control_drain(dev);
	pg_wake_all(dev);
	cancel_work_sync(&dev->config_work);
	pg_files_rescue(dev);
	dev->vdev->config->del_vqs(dev->vdev);
}

/**
 * pg_probe() - A device of this id was found.
 * @vdev: the virtio device
 *
 * Context: Process context, sleeps.
 * Return: 0 or negative errno; the reason is logged.
 */
static int pg_probe(struct virtio_device *vdev)
{
	struct virtio_peergate_config config;
	struct pg_session *session;
	struct pg_device *dev;
	int ret;

	ret = pg_check(vdev, &config);
	if (ret)
		return ret;
	dev = pg_device_alloc(vdev, &config);
	if (IS_ERR(dev))
		return PTR_ERR(dev);
	vdev->priv = dev;
	ret = pg_find_queues(dev);
	if (ret)
		goto err_reset;
	dev->interrupt = pg_interrupt_kind(vdev);
	virtio_device_ready(vdev);
	pg_events_post(dev);

	ret = pg_introduce(dev);
	if (ret)
		goto err_stop;
	cdev_init(&dev->cdev, &pg_fops);
	dev->cdev.owner = THIS_MODULE;
	ret = cdev_device_add(&dev->cdev, &dev->dev);
	if (ret)
		goto err_stop;
	/* Who opened the device already may have had a new session begun. */
	session = pg_session_get(dev);
	dev_info(&dev->dev, "version %u, session %u, %u endpoints, %u submission queues, %s\n",
		 session->version, session->number, session->endpoint_count,
		 dev->queue_count - VIRTIO_PEERGATE_VQ_SUBMIT,
		 dev->interrupt == PEERGATE_INTERRUPT_MSIX ? "MSI-X" : "INTx");
	pg_session_put(session);
	return 0;

err_reset:
	/* Queues that were set up before one failed are only let go by a reset. */
	virtio_reset_device(vdev);
	goto err_put;
err_stop:
	pg_stop(dev);
err_put:
	vdev->priv = NULL;
	pg_device_put(dev);
	return ret;
}

/**
 * pg_remove() - The device goes, or the driver does.
 * @vdev: the virtio device
 *
 * Context: Process context, sleeps.
 */
static void pg_remove(struct virtio_device *vdev)
{
	struct pg_device *dev = vdev->priv;

	cdev_device_del(&dev->cdev, &dev->dev);
	pg_farewell(dev);
	pg_stop(dev);
	pg_device_put(dev);
}

/**
 * pg_freeze() - The machine wants to suspend.
 * @vdev: the virtio device
 *
 * Return: -EBUSY.
 */
static int pg_freeze(struct virtio_device *vdev)
{
	dev_warn(&vdev->dev, "cannot suspend: the device would lose its state\n");
	return -EBUSY;
}

static struct virtio_device_id pg_ids[] = {
	{ VIRTIO_ID_PEERGATE, VIRTIO_DEV_ANY_ID },
	{ 0 },
};
MODULE_DEVICE_TABLE(virtio, pg_ids);

static struct virtio_driver pg_driver = {
	.driver.name = KBUILD_MODNAME,
	.driver.owner = THIS_MODULE,	/* Before 6.11 nobody else says so. */
	.id_table = pg_ids,
	.probe = pg_probe,
	.remove = pg_remove,
	.config_changed = pg_config_changed,
	.freeze = pm_sleep_ptr(pg_freeze),
};

/**
 * pg_init() - Load the module.
 *
 * Return: 0 or negative errno.
 */
static int __init pg_init(void)
{
	int ret;

	pg_ids[0].device = device_id;
	pg_wq = alloc_workqueue("peergate", WQ_UNBOUND, 0);
	if (!pg_wq)
		return -ENOMEM;
	ret = class_register(&pg_class);
	if (ret)
		goto err_wq;
	ret = alloc_chrdev_region(&pg_devt, 0, PG_MINORS, "peergate");
	if (ret)
		goto err_class;
	ret = register_virtio_driver(&pg_driver);
	if (ret)
		goto err_region;
	return 0;

err_region:
	unregister_chrdev_region(pg_devt, PG_MINORS);
err_class:
	class_unregister(&pg_class);
err_wq:
	destroy_workqueue(pg_wq);
	return ret;
}

/**
 * pg_exit() - Unload the module. No file is open; what closed ones left behind
 * ends with the devices.
 */
static void __exit pg_exit(void)
{
	unregister_virtio_driver(&pg_driver);
	destroy_workqueue(pg_wq);
	unregister_chrdev_region(pg_devt, PG_MINORS);
	class_unregister(&pg_class);
	ida_destroy(&pg_minors);
}

module_init(pg_init);
module_exit(pg_exit);

MODULE_DESCRIPTION("Peergate: DMA between devices of a virtual machine");
MODULE_LICENSE("GPL");
