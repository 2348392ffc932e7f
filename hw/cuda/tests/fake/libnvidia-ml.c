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

static struct {
	long init, users, is_lost;
} state;

API int fake_set(const char *name, long value)
{
	if (!strcmp(name, "init"))
		state.init = value;
	else if (!strcmp(name, "lost"))
		state.is_lost = value;
	else
		return -1;
	return 0;
}

API long fake_get(const char *name)
{
	return strcmp(name, "users") ? -1000 : state.users;
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
	if (state.is_lost)
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
