/* SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause */
/*
 * NVIDIA's management library without a GPU: what Peergate asks of it.
 */
#include <stdio.h>
#include <string.h>
#include <strings.h>

#define API __attribute__((visibility("default")))

enum {
	SUCCESS = 0,
	UNINITIALIZED = 1,
	INVALID_ARGUMENT = 2,
	NOT_SUPPORTED = 3,
	NOT_FOUND = 6,
	INSUFFICIENT_SIZE = 7,
	DRIVER_NOT_LOADED = 9,
	GPU_IS_LOST = 15,
	LIB_RM_VERSION_MISMATCH = 18,
};

struct gpu {
	const char *uuid, *address, *name;
	unsigned int milliwatts;
	unsigned long long millijoules;
};

/* The second one cannot measure. */
static const struct gpu gpus[] = {
	{ "GPU-00112233-4455-6677-8899-aabbccddee00", "00000000:1A:00.0", "Fake GPU 0", 71234, 9876543210ull },
	{ "GPU-00112233-4455-6677-8899-aabbccddee01", "00000000:1B:00.0", "Fake GPU 1", 0, 0 },
};

/* By their names for tests. */
static struct {
	long init, users, lost;
	/* Links that are up, how many of them end at the other GPU (the others at a switch), and where the ways over PCIe meet. */
	long nvlinks, straight, ancestor;
} state = { .nvlinks = 18, .ancestor = 30 };

static const struct {
	const char *name;
	long *value;
} names[] = {
	{ "init", &state.init },       { "users", &state.users },       { "lost", &state.lost },
	{ "nvlinks", &state.nvlinks }, { "straight", &state.straight }, { "ancestor", &state.ancestor },
};

static long *number(const char *name)
{
	size_t i;

	for (i = 0; i < sizeof(names) / sizeof(*names); i++)
		if (!strcmp(name, names[i].name))
			return names[i].value;
	return NULL;
}

API int fake_set(const char *name, long value)
{
	long *it = number(name);

	return it ? *it = value, 0 : -1;
}

API long fake_get(const char *name)
{
	long *it = number(name);

	return it ? *it : -1000;
}

API int nvmlInit_v2(void)
{
	state.users += !state.init;
	return (int)state.init;
}

API int nvmlShutdown(void)
{
	return state.users > 0 ? state.users--, SUCCESS : UNINITIALIZED;
}

API const char *nvmlErrorString(int error)
{
	switch (error) {
	case DRIVER_NOT_LOADED:
		return "Driver Not Loaded";
	case NOT_SUPPORTED:
		return "Not Supported";
	case NOT_FOUND:
		return "Not Found";
	case GPU_IS_LOST:
		return "GPU is lost";
	case LIB_RM_VERSION_MISMATCH:
		return "Driver/library version mismatch";
	default:
		return "Unknown Error";
	}
}

static int write_text(char *out, unsigned int len, const char *text)
{
	return snprintf(out, len, "%s", text) < (int)len ? SUCCESS : INSUFFICIENT_SIZE;
}

API int nvmlSystemGetDriverVersion(char *version, unsigned int len)
{
	return state.users ? write_text(version, len, "580.159.04") : UNINITIALIZED;
}

static int find(const char *which, const struct gpu **out)
{
	size_t i;

	if (!state.users)
		return UNINITIALIZED;
	for (i = 0; i < sizeof(gpus) / sizeof(*gpus); i++)
		/* A domain of four digits is understood, too. */
		if (!strcasecmp(which, gpus[i].uuid) || !strcasecmp(which, gpus[i].address) ||
		    !strcasecmp(which, gpus[i].address + 4)) {
			*out = &gpus[i];
			return SUCCESS;
		}
	return NOT_FOUND;
}

API int nvmlDeviceGetHandleByUUID(const char *uuid, const struct gpu **out)
{
	return strncmp(uuid, "GPU-", 4) ? INVALID_ARGUMENT : find(uuid, out);
}

API int nvmlDeviceGetHandleByPciBusId_v2(const char *address, const struct gpu **out)
{
	return strchr(address, ':') ? find(address, out) : INVALID_ARGUMENT;
}

static int may(const struct gpu *gpu)
{
	if (!state.users)
		return UNINITIALIZED;
	if (state.lost)
		return GPU_IS_LOST;
	return gpu->milliwatts ? SUCCESS : NOT_SUPPORTED;
}

API int nvmlDeviceGetName(const struct gpu *gpu, char *name, unsigned int len)
{
	return may(gpu) == GPU_IS_LOST ? GPU_IS_LOST : write_text(name, len, gpu->name);
}

API int nvmlDeviceGetPowerUsage(const struct gpu *gpu, unsigned int *milliwatts)
{
	*milliwatts = gpu->milliwatts;
	return may(gpu);
}

API int nvmlDeviceGetTotalEnergyConsumption(const struct gpu *gpu, unsigned long long *millijoules)
{
	*millijoules = gpu->millijoules;
	return may(gpu);
}

/* What is between two. */

struct pci {
	char legacy[16];
	unsigned int domain, bus, device, ids[2];
	char text[32];
};

static int describe(struct pci *out, const char *address)
{
	memset(out, 0, sizeof(*out));
	snprintf(out->text, sizeof(out->text), "%s", address);
	snprintf(out->legacy, sizeof(out->legacy), "%s", address + 4);
	return sscanf(address, "%x:%x:%x", &out->domain, &out->bus, &out->device) == 3 ? SUCCESS : INVALID_ARGUMENT;
}

static int may_both(const struct gpu *one, const struct gpu *other)
{
	if (!state.users)
		return UNINITIALIZED;
	if (state.lost)
		return GPU_IS_LOST;
	return one == other ? INVALID_ARGUMENT : SUCCESS;
}

API int nvmlDeviceGetPciInfo_v3(const struct gpu *gpu, struct pci *out)
{
	return state.lost ? GPU_IS_LOST : describe(out, gpu->address);
}

API int nvmlDeviceGetP2PStatus(const struct gpu *one, const struct gpu *other, int what, int *status)
{
	/* 2 is NVLink; what is not OK is "not supported". */
	*status = what == 2 && state.nvlinks ? 0 : 5;
	return may_both(one, other);
}

API int nvmlDeviceGetTopologyCommonAncestor(const struct gpu *one, const struct gpu *other, int *level)
{
	*level = (int)state.ancestor;
	return state.ancestor < 0 ? NOT_SUPPORTED : may_both(one, other);
}

API int nvmlDeviceGetNvLinkState(const struct gpu *gpu, unsigned int link, int *is_active)
{
	(void)gpu;
	/* Some are down, and some it does not have. */
	*is_active = link < state.nvlinks;
	return *is_active || link < 16 ? SUCCESS : NOT_SUPPORTED;
}

API int nvmlDeviceGetNvLinkRemotePciInfo_v2(const struct gpu *gpu, unsigned int link, struct pci *out)
{
	const struct gpu *other = &gpus[gpu == &gpus[0]];

	return describe(out, link < state.straight ? other->address : "00000000:05:00.0");
}
