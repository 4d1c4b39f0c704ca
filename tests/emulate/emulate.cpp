/*
 * The fibers behind tests/emulate/cuda_runtime.h: one block at a time on the calling thread, its threads resumed in turn
 * until each has come to the barrier it waits for. SPW_EMULATE_ORDER says in which order, and no order may change a bit of any
 * result: by default all threads advance together and asynchronous copies arrive as late as they may; "ahead" and "behind" let
 * the first or the last warp run as far as it can before the others, copies arriving at once, so that a barrier that is
 * missing lets it overwrite what the others still read, "behind" with the last block first, so that one that writes what another
 * reads shows too; a number shuffles the threads. Device memory and dynamic shared memory begin as NaN. Test code: it may abort.
 */
#include "cuda_runtime.h"
#include "counts.h"
#include "spw_base.h"
#include <signal.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>
#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace emulate
{
here now;

namespace
{
enum { STACK_BYTES = 256 << 10, THREADS_MAX = 1024 };

/* What a thread has asked for, group after group, of which so many have been waited for. */
template <class T> struct asked {
    std::vector<T> all;
    std::vector<size_t> ends; /* of groups that were committed */
    size_t there, groups_there;
    void
    clear()
    {
        all.clear();
        ends.clear();
        there = groups_there = 0;
    }
    void
    commit()
    {
        ends.push_back(all.size());
    }
    template <class F>
    void
    wait(unsigned groups_left, F arrive)
    {
        for (; ends.size() - groups_there > groups_left; groups_there++)
            while (there < ends[groups_there])
                arrive(all[there++]);
    }
};

struct fiber {
    unsigned char *stack;
#if defined(__x86_64__)
    void *sp;
#else
    ucontext_t context;
#endif
    uint3 thread;
    unsigned warp;
    int lane;
    bool begun, done;
    const unsigned *waits_for; /* runs on when this counter is no longer waits_at */
    unsigned waits_at;
    struct copy {
        void *dst;
        const void *src;
        size_t bytes; /* 0: 16 zeros */
    };
    struct factor { /* of a product */
        const void *p;
        size_t bytes;
    };
    asked<copy> copies;
    asked<factor> factors;
};

struct warp {
    unsigned arrived, generation, alive;
    unsigned char slots[2][32 * SLOT_BYTES];
};

struct machine {
    std::vector<fiber> fibers;
    std::vector<warp> warps;
    std::vector<unsigned> order;
    bool greedy;    /* a warp goes on as long as it can, and copies arrive at once */
    bool backwards; /* the last thread and the last block are first */
    std::vector<unsigned char> shared;
    unsigned arrived, generation, alive;
    fiber *current;
    unsigned next, last; /* those of `order` that are to be tried after it, before the scheduler decides */
    const std::function<void()> *body;
#if defined(__x86_64__)
    void *sp;
#else
    ucontext_t context;
#endif
};
/* One, for grids run under the lock: in a plugin a thread-local one is a call, and with the asan a slow one, for each use. */
machine &m = *new machine(); /* outlives all users */

[[noreturn]] void
stop(const char *why)
{
    fprintf(stderr, "emulated kernel: %s\n", why);
    abort();
}
} // namespace

#if defined(__x86_64__)
extern "C" void spw_emulate_switch(void **save, void *to);
asm(R"(
.text
.globl spw_emulate_switch
.hidden spw_emulate_switch
.type spw_emulate_switch, @function
spw_emulate_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size spw_emulate_switch, .-spw_emulate_switch
)");
#endif

namespace
{
void
tell_races(const fiber *f)
{
#ifdef SPW_EMULATE_RACES
    races::now = {
        (uintptr_t)f->stack,        STACK_BYTES,     (uintptr_t)m.warps.data(),       m.warps.size() * sizeof(warp),
        (uintptr_t)m.shared.data(), m.shared.size(), f->warp * 32 + (unsigned)f->lane};
#else
    (void)f;
#endif
}

/* The next of those to be tried that can go on; NULL: none. */
fiber *
next_ready()
{
    while (m.next < m.last) {
        fiber *f = &m.fibers[m.order[m.next++]];
        if (f->done || (f->waits_for != NULL && *f->waits_for == f->waits_at))
            continue;
        f->waits_for = NULL;
        m.current = f;
        now.thread = f->thread;
        now.lane = f->lane;
        tell_races(f);
#if defined(__x86_64__)
        if (m.next < m.last) /* the stack of the one after it, which is a page of its own */
            __builtin_prefetch(m.fibers[m.order[m.next]].sp);
#endif
        return f;
    }
    return NULL;
}

void fiber_main();

/* The first time it begins at the top of its stack. */
void
prepare(fiber *f)
{
    if (f->begun)
        return;
    f->begun = true;
#if defined(__x86_64__)
    /* Not all at the same place of a page: a cache has few lines for that. */
    void **top = (void **)(f->stack + STACK_BYTES - (f - m.fibers.data()) % 60 * 1088);
    *--top = NULL; /* where fiber_main would return to; keeps the stack aligned as after a call */
    *--top = (void *)fiber_main;
    for (int i = 0; i < 6; i++)
        *--top = NULL;
    f->sp = top;
#else
    getcontext(&f->context);
    f->context.uc_stack.ss_sp = f->stack;
    f->context.uc_stack.ss_size = STACK_BYTES;
    f->context.uc_link = NULL;
    makecontext(&f->context, fiber_main, 0);
#endif
}

/*
 * Lets that thread go on, NULL: the scheduler. AddressSanitizer is not told: that would take as long as all that threads do, and what it finds
 * it finds by address; of a stack's bytes it only does not know whose they are.
 */
void
leave(fiber *f, fiber *to)
{
    if (to != NULL)
        prepare(to);
#if defined(__x86_64__)
    spw_emulate_switch(&f->sp, to != NULL ? to->sp : m.sp);
#else
    swapcontext(&f->context, to != NULL ? &to->context : &m.context);
#endif
}

void
run_thread(fiber *f)
{
    (*m.body)();
    f->done = true;
    m.alive--;
    if (m.arrived > 0 && m.arrived == m.alive) { /* a thread that has left is waited for no more */
        m.arrived = 0;
        m.generation++;
        races::sync_block();
    }
    warp *w = &m.warps[f->warp];
    w->alive--;
    if (w->arrived > 0)
        stop("a thread left while its warp waits for it");
}

/* Threads, one after the other on one stack, as long as the next has not begun: where they never wait for each other that is all of them. */
void
fiber_main()
{
    fiber *f = m.current, *to;
    for (run_thread(f); (to = next_ready()) != NULL && !to->begun; run_thread(f)) {
        std::swap(to->stack, f->stack);
        f = to;
        f->begun = true;
        tell_races(f);
    }
    leave(f, to);
    stop("a finished thread was resumed");
}

void
start(fiber *f, unsigned idx, dim3 block)
{
    f->thread = {idx % block.x, idx / block.x % block.y, idx / block.x / block.y};
    f->warp = idx / 32;
    f->lane = (int)idx % 32;
    f->begun = f->done = false;
    f->waits_for = NULL;
    f->copies.clear();
    f->factors.clear();
}

void
wait_for(const unsigned *counter, unsigned at)
{
    fiber *f = m.current;
    f->waits_for = counter;
    f->waits_at = at;
    leave(f, next_ready());
}

/* Lets those of order[from, to) go on that can, one after the other. False: none could. */
bool
run_threads(unsigned from, unsigned to)
{
    fiber *f;
    m.next = from;
    m.last = to;
    if ((f = next_ready()) == NULL)
        return false;
    prepare(f);
#if defined(__x86_64__)
    spw_emulate_switch(&m.sp, f->sp);
#else
    swapcontext(&m.context, &f->context);
#endif
    return true;
}

void
run_block(unsigned threads, dim3 block)
{
    m.arrived = m.generation = 0;
    m.alive = threads;
    m.warps.resize(threads / 32);
    races::begin_block();
    for (warp &w : m.warps)
        w.arrived = w.generation = w.alive = 0;
    for (unsigned i = 0; i < threads; i++) {
        start(&m.fibers[i], i, block);
        m.warps[i / 32].alive++;
    }
    while (m.alive > 0) {
        bool moved = false;
        for (unsigned at = 0; at < threads; at += 32)
            while (run_threads(at, at + 32)) {
                moved = true;
                if (!m.greedy)
                    break;
            }
        if (!moved)
            stop("its threads wait for each other: a barrier that not all of them reach");
    }
}

void
put_in_order(unsigned threads)
{
    const char *given = getenv("SPW_EMULATE_ORDER");
    m.order.resize(threads);
    m.backwards = given != NULL && strcmp(given, "behind") == 0;
    for (unsigned i = 0; i < threads; i++)
        m.order[i] = m.backwards ? threads - 1 - i : i;
    m.greedy = m.backwards || (given != NULL && strcmp(given, "ahead") == 0);
    if (given != NULL && given[0] >= '0' && given[0] <= '9') {
        uint64_t seed = strtoull(given, NULL, 10) * 2 + 1;
        for (unsigned i = threads - 1; i > 0; i--) {
            seed = seed * 6364136223846793005ull + 1442695040888963407ull;
            std::swap(m.order[i], m.order[(seed >> 33) % (i + 1)]);
        }
    }
}
} // namespace

static void
run_grid(dim3 grid, dim3 block, size_t shared_bytes, const std::function<void()> &body)
{
    unsigned threads = block.x * block.y * block.z;
    if (threads == 0 || threads > THREADS_MAX || threads % 32 != 0)
        stop("a block has 32 to 1024 threads, whole warps");
    if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.y > 65535 || grid.z > 65535)
        stop("a grid has at least one block, and at most 65535 in y and z");
    if (shared_bytes > emulate_shared_bytes())
        stop("more shared memory than every GPU of this capability has");
    while (m.fibers.size() < threads) {
        fiber f = {};
        f.stack = (unsigned char *)mmap(NULL, STACK_BYTES, PROT_READ | PROT_WRITE,
                                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (f.stack == MAP_FAILED)
            stop("no memory for stacks");
        m.fibers.push_back(f);
    }
    put_in_order(threads);
    races::begin_grid();
    m.body = &body;
    now.block_dim = block;
    now.grid_dim = grid;
    for (unsigned z = 0; z < grid.z; z++)
        for (unsigned y = 0; y < grid.y; y++)
            for (unsigned x = 0; x < grid.x; x++) {
                now.block = m.backwards ? uint3{grid.x - 1 - x, grid.y - 1 - y, grid.z - 1 - z} : uint3{x, y, z};
                m.shared.assign(shared_bytes + 128, 0xff);
                now.dynamic_shared = (unsigned char *)(((uintptr_t)m.shared.data() + 127) / 128 * 128);
                run_block(threads, block);
            }
}

void
sync_block()
{
    if (++m.arrived == m.alive) {
        m.arrived = 0;
        m.generation++;
        races::sync_block();
        return;
    }
    wait_for(&m.generation, m.generation);
}

unsigned char *
open_slots()
{
    warp *w = &m.warps[m.current->warp];
    return w->slots[w->generation % 2];
}

void
close_slots(void (*combine)(unsigned char *slots))
{
    warp *w = &m.warps[m.current->warp];
    if (w->alive != 32)
        stop("part of a warp is gone where all of it is needed");
    if (++w->arrived < w->alive) {
        wait_for(&w->generation, w->generation);
        return;
    }
    if (combine != NULL)
        combine(w->slots[w->generation % 2]);
    w->arrived = 0;
    w->generation++;
    races::met(m.current->warp);
}

void
close_slots_in_order()
{
    close_slots([](unsigned char *) { races::sync_warp(m.current->warp); });
}

static void
copy_now(const fiber::copy &c)
{
    if (c.bytes == 0)
        memset(c.dst, 0, 16);
    else
        memcpy(c.dst, c.src, c.bytes);
}

/* From when it is asked for until it is waited for. */
static void
touch_copied(const fiber::copy &c)
{
    races::touch(c.dst, 16, races::WRITE);
    races::touch(c.src, c.bytes, races::READ);
}

void
copy_later(void *dst, const void *src, size_t bytes)
{
    const fiber::copy c = {dst, src, bytes};
    if ((uintptr_t)dst % 16 != 0 || (bytes > 0 && (uintptr_t)src % 16 != 0))
        stop("an asynchronous copy is not aligned");
    m.current->copies.all.push_back(c);
    touch_copied(c);
    if (m.greedy)
        copy_now(c);
}

void
copy_commit()
{
    m.current->copies.commit();
}

void
copy_wait(unsigned groups_left)
{
    m.current->copies.wait(groups_left, [](const fiber::copy &c) {
        touch_copied(c);
        if (!m.greedy)
            copy_now(c);
    });
}

/* One lane tells for its warp. */
void
product_reads(const void *p, size_t bytes)
{
    if (now.lane != 0)
        return;
    m.current->factors.all.push_back({p, bytes});
    races::touch(p, bytes, races::PRODUCT);
}

void
product_commit()
{
    m.current->factors.commit();
}

void
product_wait(unsigned groups_left)
{
    m.current->factors.wait(groups_left, [](const fiber::factor &f) { races::touch(f.p, f.bytes, races::READ); });
}
} // namespace emulate

/* ---------------------------------------------------------------- streams */

/*
 * A stream is a list of work. It runs as far as somebody waits for: at once by default, and late, when a thread synchronises
 * with it, with SPW_EMULATE_STREAMS=late. A wait that the caller forgot then reads what has not been written. With "odd" every
 * second stream is late and the others run ahead: then a forgotten wait overwrites what is still to be read. A number draws which
 * stream goes on, and how far, whenever something is submitted. SPW_EMULATE_WAIT_US: who waits for an event, above all threads that tell what
 * has passed, comes so many microseconds late. Work that needs another process is tried again and again, by
 * whoever waits, and never under the lock meanwhile. Memory of streams is never freed, as events may point at them.
 */
struct emulated_stream {
    std::deque<std::function<bool()>> work;     /* false: it could not be finished yet */
    std::deque<std::vector<const void *>> uses; /* of each: device memory that it was given */
    uint64_t done, submitted;
    int device_idx;
    bool odd;
    bool busy; /* its front is being run: the work of a stream is no reason to run that same stream */
};
struct emulated_event {
    emulated_stream *stream; /* NULL: never recorded */
    uint64_t mark;
    int device_idx;
    std::shared_ptr<uint64_t> passed_ns; /* NULL: without timing. The stream's too: it may outlive the event */
};

static std::recursive_mutex device; /* one thing at a time, on whatever thread waits */
static std::vector<emulated_stream *> &streams = *new std::vector<emulated_stream *>(); /* outlives all users */
static std::vector<emulated_stream *> &ended = *new std::vector<emulated_stream *>();   /* destroyed, and not lost */
static spw_emulate_counts counts;                                                       /* under the same lock */

static std::vector<const void *> &loaded = *new std::vector<const void *>(); /* likewise: kernels */
struct pinned {
    char *at;
    size_t bytes;
    bool mapped; /* a kernel may use it */
};
static std::vector<pinned> &registered = *new std::vector<pinned>(); /* likewise */
static unsigned refuse_at;                                           /* likewise; 0: never */
static bool sleepers;                                                /* threads that wait for the device sleep */
static thread_local cudaError_t last_error;
static thread_local int current_device;
static thread_local bool in_host_function;
static std::map<std::thread::id, std::vector<const void *>>
    mentioned; /* by arguments of the kernel that a thread launches next */

static cudaError_t
fail(cudaError_t e)
{
    return last_error = e;
}

cudaError_t
cudaGetLastError()
{
    cudaError_t e = last_error;
    last_error = cudaSuccess;
    return e;
}

/* ---------------------------------------------------------------- what belongs to the device */

/*
 * Device memory lies in one range, so that its addresses are known from the host's. With SPW_EMULATE_GUARD=1 nobody may touch it while no
 * stream works, as on a GPU; that costs two calls of the kernel for each piece of work. Under the asan, which watches the ends of
 * blocks, and where the range cannot be had, it is the host's memory.
 */
enum : size_t { HUGE = (size_t)2 << 20 };
struct arena {
    char *base, *end, *top; /* base NULL: there is none */
    bool guard;
    unsigned working; /* streams that are being run, one inside another */
    std::vector<std::pair<char *, size_t>> idle;
};
static arena &memory = *new arena(); /* outlives all users; under the device's lock */

static void
told(int, siginfo_t *info, void *)
{
    static const char why[] = "emulated device: the host reads or writes device memory\n";
    const char *at = (const char *)info->si_addr;
    if (at >= memory.base && at < memory.end && write(2, why, sizeof why - 1) < 0)
        _exit(1);
    signal(SIGSEGV, SIG_DFL); /* the access is made again, and ends the process */
}

static bool
open_arena()
{
#if defined(__SANITIZE_ADDRESS__)
    return false;
#else
    const char *guard = getenv("SPW_EMULATE_GUARD");
    const size_t bytes = (size_t)1 << 40;
    struct sigaction action = {};
    void *p;
    if (memory.base != NULL)
        return true;
    memory.guard = guard != NULL && strcmp(guard, "1") == 0;
    p = mmap(NULL, bytes, memory.guard ? PROT_NONE : PROT_READ | PROT_WRITE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED)
        return false;
    memory.end = (char *)p + bytes;
    memory.base = memory.top = (char *)(((uintptr_t)p + HUGE - 1) / HUGE * HUGE);
    (void)madvise(memory.base, (size_t)(memory.end - memory.base), MADV_HUGEPAGE); /* opened and closed in few pieces */
    action.sa_sigaction = told;
    action.sa_flags = SA_SIGINFO;
    if (memory.guard)
        sigaction(SIGSEGV, &action, NULL);
    return true;
#endif
}

static bool
on_device(const void *p)
{
    return (const char *)p >= memory.base && (const char *)p < memory.top;
}

/* While it lives the device's memory is open. */
struct working {
    working()
    {
        if (memory.working++ == 0 && memory.guard)
            protect(PROT_READ | PROT_WRITE);
    }
    ~working()
    {
        if (--memory.working == 0 && memory.guard)
            protect(PROT_NONE);
    }
    static void
    protect(int how)
    {
        (void)mprotect(memory.base, ((size_t)(memory.top - memory.base) + HUGE - 1) / HUGE * HUGE, how);
    }
};

static size_t
whole_pages(size_t bytes)
{
    return (bytes + 4095) / 4096 * 4096;
}

static void *
take_memory(size_t bytes)
{
    char *p;
    if (!open_arena())
        return aligned_alloc(256, whole_pages(bytes));
    for (size_t i = 0; i < memory.idle.size(); i++)
        if (memory.idle[i].second == whole_pages(bytes)) {
            p = memory.idle[i].first;
            memory.idle.erase(memory.idle.begin() + (long)i);
            return p;
        }
    if (whole_pages(bytes) + 4096 > (size_t)(memory.end - memory.top))
        return NULL;
    p = memory.top;
    memory.top += whole_pages(bytes) + 4096; /* behind it a page that nobody may touch */
    if (!memory.guard && mprotect(memory.top - 4096, 4096, PROT_NONE) != 0)
        emulate::stop("no page behind device memory could be closed");
    return p;
}

static void
give_memory(void *p, size_t bytes)
{
    if (on_device(p))
        memory.idle.push_back({(char *)p, whole_pages(bytes)});
    else
        free(p);
}

/* Of what a kernel is given, words that look like addresses: they must be the device's, or of host memory that it may use. */
void
emulate::check_addresses(const char *kernel, const void *bytes, size_t n)
{
    std::lock_guard<std::recursive_mutex> hold(device);
    for (size_t i = 0; memory.base != NULL && i + 8 <= n; i += 8) {
        uint64_t word;
        memcpy(&word, (const char *)bytes + i, 8);
        bool there = on_device((const void *)(uintptr_t)word);
        bool known = word >> 47 != 0 || word < 0x500000000000 || there;
        if (there)
            mentioned[std::this_thread::get_id()].push_back((const void *)(uintptr_t)word);
        for (const pinned &r : registered)
            known = known || (r.mapped && word - (uintptr_t)r.at < r.bytes);
        if (!known) {
            fprintf(stderr, "%s, word %zu of an argument:\n", kernel, i / 8);
            stop("it gets an address of host memory");
        }
    }
}

/* A call of the runtime. What the stream does where, a kernel above all, must be done with its device current. */
static void
called(const emulated_stream *stream = NULL)
{
    if (in_host_function)
        emulate::stop("a host function of a stream calls the runtime");
    if (stream != NULL && stream->device_idx != current_device)
        emulate::stop("work for a stream of another device than the thread's");
}

cudaError_t
cudaSetDevice(int device_idx)
{
    int count = 0;
    called();
    (void)cudaGetDeviceCount(&count);
    if (device_idx < 0 || device_idx >= count)
        return fail(cudaErrorInvalidValue);
    current_device = device_idx;
    return cudaSuccess;
}

static bool
is_refused()
{
    std::lock_guard<std::recursive_mutex> hold(device);
    return refuse_at > 0 && --refuse_at == 0;
}

extern "C" __attribute__((visibility("default"))) bool spw_emulate_refuse(unsigned k);
bool
spw_emulate_refuse(unsigned k)
{
    std::lock_guard<std::recursive_mutex> hold(device);
    bool fired = refuse_at == 0;
    refuse_at = k;
    return fired;
}

cudaError_t
cudaInitDevice(int, unsigned device_flags, unsigned flags)
{
    sleepers = device_flags == cudaDeviceScheduleBlockingSync && flags == cudaInitDeviceFlagsAreValid;
    return cudaSuccess;
}

static void
count(uint64_t *what)
{
    std::lock_guard<std::recursive_mutex> hold(device);
    ++*what;
}

extern "C" __attribute__((visibility("default"))) void spw_emulate_count(spw_emulate_counts *out);
void
spw_emulate_count(spw_emulate_counts *out)
{
    std::lock_guard<std::recursive_mutex> hold(device);
    *out = counts;
    out->kernels = loaded.size();
    for (const emulated_stream *s : streams)
        out->under_way += s->submitted - s->done;
}

/* Lock held. As far as it goes now; whether that is to the mark. */
static bool
run_towards(emulated_stream *s, uint64_t mark)
{
    if (s == NULL || s->busy || s->done >= mark)
        return s == NULL || s->done >= mark;
    working now;
    while (s->done < mark) {
        s->busy = true;
        bool finished = s->work.front()();
        s->busy = false;
        if (!finished)
            return false;
        s->work.pop_front();
        s->uses.pop_front();
        s->done++;
    }
    return true;
}

static void
run_until(emulated_stream *s, uint64_t mark)
{
    for (;;) {
        {
            std::lock_guard<std::recursive_mutex> hold(device);
            if (run_towards(s, mark))
                return;
        }
        usleep(50);
    }
}

/* Lock held. Half of the time some stream goes on, up to some place. */
static void
run_by_chance(const char *number)
{
    static uint64_t seed, state;
    uint64_t wanted = strtoull(number, NULL, 10) * 2 + 1, draw;
    if (seed != wanted)
        seed = state = wanted;
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    draw = state >> 33;
    if (draw % 2 == 0)
        return;
    emulated_stream *s = streams[draw / 2 % streams.size()];
    uint64_t left = s->submitted - s->done;
    (void)run_towards(s, s->done + (draw / 256 % 4 == 0 ? left : draw / 1024 % (left + 1)));
}

static cudaError_t
submit_trying(emulated_stream *s, std::function<bool()> work, std::vector<const void *> uses = {})
{
    const char *given = getenv("SPW_EMULATE_STREAMS");
    std::lock_guard<std::recursive_mutex> hold(device);
    called(s);
    s->work.push_back(std::move(work));
    s->uses.push_back(std::move(uses));
    s->submitted++;
    if (given != NULL && given[0] >= '0' && given[0] <= '9')
        run_by_chance(given);
    else if (given == NULL || (strcmp(given, "odd") == 0 ? s->odd : strcmp(given, "late") != 0))
        (void)run_towards(s, s->submitted);
    return cudaSuccess;
}

static cudaError_t
submit(emulated_stream *s, std::function<void()> work, std::vector<const void *> uses = {})
{
    return submit_trying(
        s,
        [=] {
            work();
            return true;
        },
        std::move(uses));
}

void
spw_emulate_submit(cudaStream_t stream, bool (*try_it)(void *), void *arg)
{
    submit_trying(stream, [=] { return try_it(arg); });
}

void
emulate::launch(emulated_stream *stream, const void *kernel, dim3 grid, dim3 block, size_t shared_bytes,
                std::function<void()> body)
{
    std::vector<const void *> uses;
    {
        std::lock_guard<std::recursive_mutex> hold(device);
        uses.swap(mentioned[std::this_thread::get_id()]);
        counts.launches++;
        if (!loaded.empty() && std::find(loaded.begin(), loaded.end(), kernel) == loaded.end())
            stop("it would be loaded beside collectives");
    }
    submit(
        stream, [=] { run_grid(grid, block, shared_bytes, body); }, std::move(uses));
}

cudaError_t
cudaFuncGetAttributes(cudaFuncAttributes *, const void *kernel)
{
    std::lock_guard<std::recursive_mutex> hold(device);
    if (std::find(loaded.begin(), loaded.end(), kernel) == loaded.end())
        loaded.push_back(kernel);
    return cudaSuccess;
}

cudaError_t
cudaMemcpy(void *dst, const void *src, size_t bytes, cudaMemcpyKind)
{
    std::lock_guard<std::recursive_mutex> hold(device);
    working now;
    memcpy(dst, src, bytes);
    return cudaSuccess;
}

cudaError_t
cudaMemcpyAsync(void *dst, const void *src, size_t bytes, cudaMemcpyKind, cudaStream_t stream)
{
    count(&counts.copies);
    return submit(stream, [=] { memmove(dst, src, bytes); }, {dst, src});
}

cudaError_t
cudaMemsetAsync(void *p, int value, size_t bytes, cudaStream_t stream)
{
    count(&counts.sets);
    return submit(stream, [=] { memset(p, value, bytes); }, {p});
}

cudaError_t
cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t fn, void *arg)
{
    count(&counts.host_functions);
    return submit(stream, [=] {
        in_host_function = true;
        fn(arg);
        in_host_function = false;
    });
}

cudaError_t
cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned, int)
{
    static bool odd;
    std::lock_guard<std::recursive_mutex> hold(device);
    *stream = new emulated_stream();
    (*stream)->odd = odd;
    odd = !odd;
    (*stream)->device_idx = current_device;
    streams.push_back(*stream);
    return cudaSuccess;
}

cudaError_t
cudaStreamSynchronize(cudaStream_t stream)
{
    uint64_t mark;
    called();
    if (!sleepers)
        emulate::stop("a thread that waits for its stream would spin");
    {
        std::lock_guard<std::recursive_mutex> hold(device);
        mark = stream->submitted;
    }
    run_until(stream, mark);
    return cudaSuccess;
}

cudaError_t
cudaStreamDestroy(cudaStream_t stream)
{
    cudaError_t e = cudaStreamSynchronize(stream);
    std::lock_guard<std::recursive_mutex> hold(device);
    streams.erase(std::find(streams.begin(), streams.end(), stream));
    ended.push_back(stream);
    return e;
}

cudaError_t
cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned)
{
    std::lock_guard<std::recursive_mutex> hold(device);
    emulated_stream *other = event->stream;
    uint64_t mark = event->mark;
    return submit_trying(stream, [=] { return run_towards(other, mark); });
}

cudaError_t
cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags)
{
    if (is_refused())
        return fail(cudaErrorMemoryAllocation);
    called();
    *event = new emulated_event();
    (*event)->device_idx = current_device;
    if ((flags & cudaEventDisableTiming) == 0)
        (*event)->passed_ns = std::make_shared<uint64_t>(0);
    return cudaSuccess;
}

cudaError_t
cudaEventDestroy(cudaEvent_t event)
{
    delete event;
    return cudaSuccess;
}

cudaError_t
cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    std::lock_guard<std::recursive_mutex> hold(device);
    called(stream);
    if (event->device_idx != stream->device_idx)
        emulate::stop("an event of another device");
    event->stream = stream;
    if (event->passed_ns != NULL) {
        std::shared_ptr<uint64_t> passed = event->passed_ns;
        counts.notes++;
        submit(stream, [=] { *passed = spw_now_ns(); });
    }
    event->mark = stream->submitted;
    return cudaSuccess;
}

cudaError_t
cudaEventSynchronize(cudaEvent_t event)
{
    emulated_stream *stream;
    uint64_t mark;
    static const char *const late = getenv("SPW_EMULATE_WAIT_US");
    called();
    if (late != NULL)
        usleep((useconds_t)strtoul(late, NULL, 10));
    {
        std::lock_guard<std::recursive_mutex> hold(device);
        stream = event->stream;
        mark = event->mark;
        counts.waits += stream != NULL && stream->done < mark;
    }
    run_until(stream, mark);
    return cudaSuccess;
}

cudaError_t
cudaEventQuery(cudaEvent_t event)
{
    std::lock_guard<std::recursive_mutex> hold(device);
    return run_towards(event->stream, event->mark) ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t
cudaEventElapsedTime(float *ms, cudaEvent_t begin, cudaEvent_t end)
{
    std::lock_guard<std::recursive_mutex> hold(device);
    if (begin->passed_ns == NULL || end->passed_ns == NULL || *begin->passed_ns == 0 || *end->passed_ns == 0)
        return cudaErrorInvalidValue;
    *ms = (float)((double)(int64_t)(*end->passed_ns - *begin->passed_ns) * 1e-6);
    return cudaSuccess;
}

/* ---------------------------------------------------------------- memory */

cudaError_t
cudaHostAlloc(void **p, size_t bytes, unsigned)
{
    called();
    *p = is_refused() ? NULL : malloc(bytes);
    return *p != NULL ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}

cudaError_t
cudaHostRegister(void *p, size_t bytes, unsigned flags)
{
    std::lock_guard<std::recursive_mutex> hold(device);
    called();
    registered.push_back({(char *)p, bytes, (flags & cudaHostRegisterMapped) != 0});
    return cudaSuccess;
}

cudaError_t
cudaHostUnregister(void *p)
{
    std::lock_guard<std::recursive_mutex> hold(device);
    for (size_t i = 0; i < registered.size(); i++)
        if (registered[i].at == p) {
            registered.erase(registered.begin() + (long)i);
            return cudaSuccess;
        }
    return fail(cudaErrorInvalidValue);
}

cudaError_t
cudaPointerGetAttributes(cudaPointerAttributes *out, const void *p)
{
    std::lock_guard<std::recursive_mutex> hold(device);
    *out = {cudaMemoryTypeUnregistered, -1, NULL, (void *)(uintptr_t)p};
    for (const pinned &r : registered)
        if ((const char *)p >= r.at && (const char *)p < r.at + r.bytes)
            *out = {cudaMemoryTypeHost, 0, r.mapped ? out->hostPointer : NULL, out->hostPointer};
    return cudaSuccess;
}

static std::vector<std::pair<void *, size_t>> &blocks =
    *new std::vector<std::pair<void *, size_t>>(); /* of device memory; under the same lock */

cudaError_t
cudaMalloc(void **p, size_t bytes)
{
    std::lock_guard<std::recursive_mutex> hold(device);
    called();
    *p = is_refused() ? NULL : take_memory(bytes);
    if (*p == NULL)
        return fail(cudaErrorMemoryAllocation);
    blocks.push_back({*p, bytes});
    working now;
    memset(*p, 0xff, bytes);
    return cudaSuccess;
}

static void
free_block(void *p)
{
    std::lock_guard<std::recursive_mutex> hold(device);
    for (size_t i = 0; i < blocks.size(); i++)
        if (blocks[i].first == p) {
            give_memory(p, blocks[i].second);
            blocks.erase(blocks.begin() + (long)i);
            return;
        }
    if (p != NULL)
        emulate::stop("it frees what is no block of device memory");
}

/* Lock held. */
static bool
is_in_use(const void *p)
{
    for (const std::pair<void *, size_t> &b : blocks)
        for (const emulated_stream *s : streams)
            for (const std::vector<const void *> &uses : s->uses)
                for (const void *at : uses)
                    if (b.first == p && (const char *)at >= (const char *)p &&
                        (const char *)at < (const char *)p + b.second)
                        return true;
    return false;
}

cudaError_t
cudaFree(void *p)
{
    std::vector<emulated_stream *> all;
    called();
    if (p == NULL)
        return cudaSuccess;
    {
        std::lock_guard<std::recursive_mutex> hold(device);
        all = streams;
        counts.freed_in_use += is_in_use(p);
    }
    for (emulated_stream *s : all) /* as the real one, which waits for the device */
        run_until(s, s->submitted);
    free_block(p);
    return cudaSuccess;
}

cudaError_t
cudaMallocAsync(void **p, size_t bytes, cudaStream_t)
{
    return emulate_pools() ? cudaMalloc(p, bytes) : fail(cudaErrorNotSupported);
}

cudaError_t
cudaFreeAsync(void *p, cudaStream_t stream)
{
    return submit(stream, [=] { free_block(p); });
}
