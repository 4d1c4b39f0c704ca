/*
 * Events on lanes for Perfetto. A ring of fixed size, one atomic increment per event; written out as the JSON trace
 * format ("X" complete events, one thread id per lane).
 */
#include "spw_base.h"
#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>

struct event {
    const char *name;
    uint64_t arg, begin_ns, end_ns;
    spw_lane lane;
};

static struct event *_Atomic ring;
static uint64_t ring_count;
static _Atomic uint64_t next_event;

spw_status
spw_timeline_open(uint64_t event_count_max, spw_error *err)
{
    struct event *events = spw_mem_calloc(event_count_max, sizeof *events);
    if (events == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "timeline of %llu events", (unsigned long long)event_count_max);
    ring_count = event_count_max;
    atomic_store(&next_event, 0);
    atomic_store(&ring, events);
    return SPW_OK;
}

uint64_t
spw_timeline_bytes(uint64_t event_count_max)
{
    return event_count_max * sizeof(struct event);
}

void
spw_timeline_add(spw_lane lane, const char *name, uint64_t arg, uint64_t begin_ns, uint64_t end_ns)
{
    struct event *events = atomic_load_explicit(&ring, memory_order_acquire);
    if (events == NULL)
        return;
    events[atomic_fetch_add(&next_event, 1) % ring_count] =
        (struct event){.name = name, .arg = arg, .begin_ns = begin_ns, .end_ns = end_ns, .lane = lane};
}

spw_status
spw_timeline_write(const char *path, spw_error *err)
{
    static const char *const lanes[SPW_LANE_COUNT] = {"compute",   "h2d",        "d2h", "collectives",
                                                      "nvme read", "nvme write", "adam"};
    struct event *events = atomic_load(&ring);
    uint64_t total = atomic_load(&next_event), first;
    bool failed;
    FILE *f;
    if (events == NULL)
        return SPW_RAISE(err, SPW_EINVAL, "no timeline was recorded");
    f = fopen(path, "we");
    if (f == NULL)
        return SPW_RAISE_SYS(err, errno, "open %s", path);
    first = total > ring_count ? total - ring_count : 0;
    fprintf(f, "{\"traceEvents\":[\n");
    for (int lane = 0; lane < SPW_LANE_COUNT; lane++)
        fprintf(f, "{\"ph\":\"M\",\"pid\":1,\"tid\":%d,\"name\":\"thread_name\",\"args\":{\"name\":\"%s\"}},\n",
                lane + 1, lanes[lane]);
    for (uint64_t i = first; i < total; i++) {
        const struct event *e = &events[i % ring_count];
        if (e->name == NULL)
            continue;
        fprintf(
            f,
            "{\"ph\":\"X\",\"pid\":1,\"tid\":%d,\"name\":\"%s\",\"ts\":%.3f,\"dur\":%.3f,\"args\":{\"unit\":%llu}},\n",
            (int)e->lane + 1, e->name, (double)e->begin_ns / 1e3, (double)(e->end_ns - e->begin_ns) / 1e3,
            (unsigned long long)e->arg);
    }
    fprintf(f, "{\"ph\":\"M\",\"pid\":1,\"tid\":1,\"name\":\"process_name\",\"args\":{\"name\":\"spillway\"}}\n]}\n");
    failed = ferror(f) != 0;
    if (fclose(f) != 0 || failed)
        return SPW_RAISE_SYS(err, errno, "write %s", path);
    return SPW_OK;
}

void
spw_timeline_close(void)
{
    struct event *events = atomic_exchange(&ring, NULL);
    spw_mem_free(events);
}
