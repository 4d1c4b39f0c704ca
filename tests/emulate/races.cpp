/*
 * See races.h. Of each byte that threads share its last write is kept, and who has read it since. Time is counted in barriers: of two
 * accesses of one block those between the same two of its barriers are unordered, unless they are the same thread's, or the same
 * warp's with a __syncwarp() between them; accesses of two blocks of a grid always are, and of two grids never: what streams leave
 * unordered is shown by streams that work late (emulate.cpp). What is kept is dropped when a grid begins and there is much of it.
 */
#include "cuda_runtime.h"
#include "races.h"
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#define SPW_HOOK extern "C" __attribute__((visibility("hidden")))

namespace emulate
{
namespace races
{
running now;

namespace
{
unsigned unseen; /* above 0: hidden */
enum : unsigned { PAGE = 4096, NEAR = 4096, WARPS_MAX = 32, THREADS_MAX = 1024, PAGES_MAX = 16384 };

struct cell {
    uint32_t write_time, read_time; /* 0: none */
    uint16_t writer, writer_syncs;
    uint16_t writer_fences;
    bool atomic;       /* so was the write */
    uint8_t read_warp; /* the last, by which of its lanes and after how many of its syncs */
    uint32_t read_lanes, read_warps;
    uint16_t read_syncs;
    bool read_by_blocks; /* by several, since the grid began that read_time is of */
    const void *write_from, *read_from;
};

/* Cells of 16 bytes each at first, and of fewer from when somebody touches less of one. */
struct page {
    unsigned shift;
    cell *cells;
};

/* Where threads wait for each other: the first of them. file NULL: nobody does. */
struct site {
    const char *file;
    int line;
};

struct found_race {
    std::string text;
    const void *here, *there; /* NULL: the text says it, or it is one place */
};

struct state {
    uint32_t time, block_begin, grid_begin;
    site of_block, of_warp[WARPS_MAX];
    uint16_t syncs[WARPS_MAX];
    uint16_t fences[THREADS_MAX];
    std::unordered_map<uintptr_t, page> pages;
    struct {
        uintptr_t idx;
        page *there;
    } near[NEAR];
    std::set<std::pair<const void *, const void *>> known;
    std::set<std::string> known_texts;
    std::vector<found_race> reports;
};

/* Under the device's lock, as all that kernels do. It outlives all users. */
state &s = *new state();

cell *
make_cells(unsigned shift)
{
    void *p = mmap(NULL, (PAGE >> shift) * sizeof(cell), PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED)
        abort();
    return (cell *)p;
}

void
free_cells(const page &p)
{
    munmap(p.cells, (PAGE >> p.shift) * sizeof(cell));
}

/* The page in which what is touched lies on a cell's bounds. */
page *
page_of(uintptr_t idx, uintptr_t bounds)
{
    auto &near = s.near[idx % NEAR];
    if (near.there == NULL || near.idx != idx) {
        page *p = &s.pages[idx]; /* where it is stays */
        if (p->cells == NULL)
            *p = {4, make_cells(4)};
        near.idx = idx;
        near.there = p;
    }
    page *p = near.there;
    while (bounds % (1u << p->shift) != 0) {
        const page finer = {p->shift - 1, make_cells(p->shift - 1)};
        for (unsigned i = 0; i < PAGE >> finer.shift; i++)
            finer.cells[i] = p->cells[i / 2];
        free_cells(*p);
        *p = finer;
    }
    return p;
}

/* SPW_EMULATE_RACES: "allowed" races are no failure, and the "first" ends the process. */
bool
is_set(const char *value)
{
    const char *given = getenv("SPW_EMULATE_RACES");
    return given != NULL && strcmp(given, value) == 0;
}

/* Where that call was, by addr2line if there is one. */
void
show_place(const void *pc)
{
    Dl_info of = {};
    char command[2048] = "false";
    const char *at = (const char *)pc - 1;
    if (dladdr(at, &of) != 0 && of.dli_fname != NULL)
        snprintf(command, sizeof command, "addr2line -Cfpis -e '%s' 0x%zx >&2", of.dli_fname,
                 (size_t)(at - (const char *)of.dli_fbase));
    if (system(command) != 0)
        fprintf(stderr, "%p\n", pc);
}

void
note(const char *text, const void *here, const void *there)
{
    fprintf(stderr, "emulated kernel: %s\n", text);
    s.reports.push_back({text, here, there});
    if (is_set("first"))
        _exit(66);
}

void
report(const char *what, uint32_t when, const char *who, unsigned other, uintptr_t at, const void *here,
       const void *there)
{
    char text[256];
    if (!s.known.insert({here, there}).second)
        return;
    snprintf(text, sizeof text,
             "race %zu: thread %u of block (%u, %u, %u) %s at %#zx by %s %u%s, and nothing orders them",
             s.reports.size() + 1, now.idx, emulate::now.block.x, emulate::now.block.y, emulate::now.block.z, what,
             (size_t)at, who, other, when < s.block_begin ? " of another block" : "");
    note(text, here, there);
}

void
arrive(site *first, const char *what, const char *file, int line)
{
    char text[512];
    if (first->file == NULL)
        *first = {file, line};
    if (first->line == line && strcmp(first->file, file) == 0)
        return;
    snprintf(text, sizeof text, "threads of a %s wait for each other at %s:%d and at %s:%d", what, first->file,
             first->line, file, line);
    if (s.known_texts.insert(text).second)
        note(text, NULL, NULL);
}

/* This module's variables: those of kernels, which are static here, are a block's own (CUDA's __shared__). */
extern "C" char __bss_start __attribute__((visibility("hidden"))), _end __attribute__((visibility("hidden")));

bool
is_shared(uintptr_t at)
{
    return at - now.shared < now.shared_bytes || (at >= (uintptr_t)&__bss_start && at < (uintptr_t)&_end);
}

/* Does nothing order that write before what the running thread does now? */
bool
races_with_write(const cell &c, uint32_t begin, bool atomic)
{
    if (c.write_time < begin || (atomic && c.atomic))
        return false;
    if (c.write_time < s.block_begin)
        return true;
    return c.write_time == s.time && c.writer != now.idx &&
           (c.writer / 32 != now.idx / 32 || c.writer_syncs == s.syncs[now.idx / 32]);
}

bool
races_with_reads(const cell &c, uint32_t begin)
{
    const unsigned warp = now.idx / 32;
    if (c.read_time < begin)
        return false;
    if (c.read_time < s.block_begin || c.read_by_blocks)
        return true;
    if (c.read_time != s.time)
        return false;
    if (c.read_warps & ~(1u << warp))
        return true;
    return c.read_syncs == s.syncs[warp] && (c.read_lanes & ~(1u << now.idx % 32)) != 0;
}

void
note_read(cell *c, uint32_t begin, const void *from)
{
    const uint8_t warp = (uint8_t)(now.idx / 32);
    const bool fresh = c->read_time != s.time;
    if (fresh) {
        c->read_by_blocks = c->read_time >= begin && (c->read_by_blocks || c->read_time < s.block_begin);
        c->read_time = s.time;
        c->read_warps = 0;
    }
    if (fresh || c->read_warp != warp || c->read_syncs != s.syncs[warp]) {
        c->read_warp = warp;
        c->read_syncs = s.syncs[warp];
        c->read_lanes = 0;
    }
    c->read_warps |= 1u << warp;
    c->read_lanes |= 1u << now.idx % 32;
    c->read_from = from;
}

void
note_write(cell *c, bool atomic, const void *from)
{
    c->write_time = s.time;
    c->writer = (uint16_t)now.idx;
    c->writer_syncs = s.syncs[now.idx / 32];
    c->writer_fences = s.fences[now.idx];
    c->atomic = atomic;
    c->write_from = from;
    c->read_time = 0;
    c->read_by_blocks = false;
}

void
touch_cell(uintptr_t at, cell *c, bool shared, access how, const void *from)
{
    const bool reads = how == READ || how == PRODUCT;
    const uint32_t begin = shared ? s.block_begin : s.grid_begin; /* since then it is the same memory */
    if (reads && shared && c->write_time < begin && s.known.insert({from, NULL}).second)
        note("shared memory is read that no thread of the block has written", from, NULL);
    if (races_with_write(*c, begin, how == ATOMIC))
        report(reads ? "reads what is written" : "writes what is written", c->write_time, "thread", c->writer, at, from,
               c->write_from);
    else if (how == PRODUCT && c->write_time >= s.block_begin && c->writer_fences == s.fences[c->writer])
        report("multiplies what is written without a fence", c->write_time, "thread", c->writer, at, from,
               c->write_from);
    if (!reads && races_with_reads(*c, begin))
        report("writes what is read", c->read_time, "warp", c->read_warp, at, from, c->read_from);
    if (reads)
        note_read(c, begin, from);
    else
        note_write(c, how == ATOMIC, from);
}

/* frame: of who asks, which is a kernel where it lies on the fiber's stack */
void
touch_from(const void *p, size_t bytes, access how, const void *frame, const void *from)
{
    const uintptr_t at = (uintptr_t)p;
    if ((uintptr_t)frame - now.stack >= now.stack_bytes || at - now.stack < now.stack_bytes || unseen > 0 ||
        at - now.slots < now.slots_bytes || at - (uintptr_t)&emulate::now < sizeof emulate::now)
        return;
    const bool shared = is_shared(at);
    for (uintptr_t b = at, end = at + bytes, past; b < end; b = past) {
        past = (b / PAGE + 1) * PAGE < end ? (b / PAGE + 1) * PAGE : end;
        const page *p = page_of(b / PAGE, b | past);
        for (; b < past; b += 1u << p->shift)
            touch_cell(b, &p->cells[b % PAGE >> p->shift], shared, how, from);
    }
}

void
forget_pages()
{
    for (auto &p : s.pages)
        free_cells(p.second);
    s.pages.clear();
    memset(s.near, 0, sizeof s.near);
}

/* At the end: where, in the sources, and that the run has failed. */
struct at_exit {
    ~at_exit()
    {
        fflush(NULL);
        for (const auto &r : s.reports) {
            fprintf(stderr, "%s%s\n", r.text.c_str(), r.here != NULL ? ":" : "");
            if (r.here != NULL) {
                show_place(r.here);
                if (r.there != NULL)
                    show_place(r.there);
            }
        }
        if (!s.reports.empty() && !is_set("allowed"))
            _exit(66);
    }
} last;
} // namespace

void
begin_grid()
{
    if (s.pages.size() > PAGES_MAX)
        forget_pages();
    s.grid_begin = s.time + 1;
}

void
begin_block()
{
    s.block_begin = ++s.time;
    memset(s.syncs, 0, sizeof s.syncs);
    memset(s.fences, 0, sizeof s.fences);
    memset(s.of_warp, 0, sizeof s.of_warp);
    s.of_block.file = NULL;
}

void
at_block(const char *file, int line)
{
    arrive(&s.of_block, "block", file, line);
}

void
at_warp(const char *file, int line)
{
    arrive(&s.of_warp[now.idx / 32], "warp", file, line);
}

/* Is the barrier that is complete one that shall order nothing? */
static bool
is_left_out(const site &met)
{
    static const char *const left_out = getenv("SPW_EMULATE_WITHOUT");
    char text[512];
    if (left_out == NULL)
        return false;
    snprintf(text, sizeof text, "%s:%d", met.file, met.line);
    return strcmp(text, left_out) == 0;
}

void
sync_block()
{
    s.time += !is_left_out(s.of_block);
    s.of_block.file = NULL;
}

void
sync_warp(unsigned warp)
{
    s.syncs[warp] = (uint16_t)(s.syncs[warp] + !is_left_out(s.of_warp[warp]));
}

void
met(unsigned warp)
{
    s.of_warp[warp].file = NULL;
}

void
hide()
{
    unseen++;
}

void
show()
{
    unseen--;
}

void
fence()
{
    s.fences[now.idx]++;
}

void
touch(const void *p, size_t bytes, access how)
{
    touch_from(p, bytes, how, __builtin_frame_address(0), __builtin_return_address(0));
}

unsigned
found()
{
    return (unsigned)s.reports.size();
}
} // namespace races
} // namespace emulate

/* ---------------------------------------------------------------- what the compiler calls */

using namespace emulate::races;

#define HOOK(name, bytes, how)                                                                                         \
    SPW_HOOK void name(const void *p);                                                                                 \
    void name(const void *p)                                                                                           \
    {                                                                                                                  \
        touch_from(p, bytes, how, __builtin_frame_address(0), __builtin_return_address(0));                            \
    }
#define HOOKS(bytes)                                                                                                   \
    HOOK(__tsan_read##bytes, bytes, READ)                                                                              \
    HOOK(__tsan_write##bytes, bytes, WRITE)                                                                            \
    HOOK(__tsan_unaligned_read##bytes, bytes, READ)                                                                    \
    HOOK(__tsan_unaligned_write##bytes, bytes, WRITE)                                                                  \
    HOOK(__tsan_volatile_read##bytes, bytes, READ)                                                                     \
    HOOK(__tsan_volatile_write##bytes, bytes, WRITE)
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)

SPW_HOOK void __tsan_read_range(const void *p, size_t bytes);
void
__tsan_read_range(const void *p, size_t bytes)
{
    touch_from(p, bytes, READ, __builtin_frame_address(0), __builtin_return_address(0));
}

SPW_HOOK void __tsan_write_range(const void *p, size_t bytes);
void
__tsan_write_range(const void *p, size_t bytes)
{
    touch_from(p, bytes, WRITE, __builtin_frame_address(0), __builtin_return_address(0));
}

SPW_HOOK uint64_t __tsan_atomic64_fetch_add(volatile uint64_t *p, uint64_t v, int);
uint64_t
__tsan_atomic64_fetch_add(volatile uint64_t *p, uint64_t v, int)
{
    return __atomic_fetch_add(p, v, __ATOMIC_RELAXED);
}

SPW_HOOK uint64_t __tsan_atomic64_load(const volatile uint64_t *p, int);
uint64_t
__tsan_atomic64_load(const volatile uint64_t *p, int)
{
    return __atomic_load_n(p, __ATOMIC_RELAXED);
}

SPW_HOOK void __tsan_init();
void
__tsan_init()
{
}

SPW_HOOK void __tsan_vptr_update(void **, void *);
void
__tsan_vptr_update(void **, void *)
{
}

SPW_HOOK void __tsan_vptr_read(void **);
void
__tsan_vptr_read(void **)
{
}
