/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Peergate driver: what kernels older than 7.3 lack, as far back as 6.1.
 *
 * The driver is written for the newest of them. Whatever differs stands here and
 * nowhere else; each part names the kernel that made it superfluous.
 */
#ifndef _PEERGATE_COMPAT_H
#define _PEERGATE_COMPAT_H

#include <linux/mm.h>
#include <linux/slab.h>
#include <linux/version.h>
#include <linux/virtio.h>
#include <linux/virtio_config.h>

/* 7.0, and stable kernels that took it over. */
#ifndef kzalloc_obj
#define pg_first(x, ...)		x
#define pg_gfp(...)			pg_first(__VA_ARGS__ __VA_OPT__(,) GFP_KERNEL)
#define kzalloc_obj(x, ...)		kzalloc(sizeof(x), pg_gfp(__VA_ARGS__))
#define kzalloc_objs(x, n, ...)		kcalloc(n, sizeof(x), pg_gfp(__VA_ARGS__))
#endif

/* 6.12 */
#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 12, 0)
#define pg_kvrealloc(p, old_size, size, flags)	kvrealloc(p, old_size, size, flags)
#else
#define pg_kvrealloc(p, old_size, size, flags)	kvrealloc(p, size, flags)
#endif

/* 6.11 */
#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 11, 0)
/**
 * struct virtqueue_info - What a virtqueue is to be.
 * @name: its name
 * @callback: called when it has used buffers
 */
struct virtqueue_info {
	const char *name;
	vq_callback_t *callback;
};

/**
 * pg_find_vqs() - virtio_find_vqs() as it was before, behind its new face.
 * @vdev: the virtio device
 * @count: how many virtqueues
 * @vqs: gets them
 * @info: what each is to be
 * @affinity: how to spread interrupts, or NULL
 *
 * Return: 0 or negative errno.
 */
static inline int pg_find_vqs(struct virtio_device *vdev, unsigned int count,
			      struct virtqueue *vqs[], struct virtqueue_info info[],
			      struct irq_affinity *affinity)
{
	vq_callback_t **callbacks = kcalloc(count, sizeof(*callbacks), GFP_KERNEL);
	const char **names = kcalloc(count, sizeof(*names), GFP_KERNEL);
	int ret = -ENOMEM;
	unsigned int i;

	if (callbacks && names) {
		for (i = 0; i < count; i++) {
			callbacks[i] = info[i].callback;
			names[i] = info[i].name;
		}
		ret = virtio_find_vqs(vdev, count, vqs, callbacks, names, affinity);
	}
	kfree(names);
	kfree(callbacks);
	return ret;
}

#define virtio_find_vqs	pg_find_vqs
#endif

/* 6.3 */
#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 3, 0)
/**
 * vm_flags_clear() - Clear flags of an area.
 * @vma: the area, of an mm whose lock is held for writing
 * @flags: the flags
 */
static inline void vm_flags_clear(struct vm_area_struct *vma, vm_flags_t flags)
{
	vma->vm_flags &= ~flags;
}
#endif

/*
 * 6.2. Before it, a page pinned for reading may be one that the program shares
 * until it writes, and that it leaves behind then: the device would read what
 * was there before. A page that could be written is the program's own.
 */
#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 2, 0)
#define PG_FOLL_READ	(FOLL_WRITE | FOLL_FORCE)
#else
#define PG_FOLL_READ	0
#endif

#endif /* _PEERGATE_COMPAT_H */
