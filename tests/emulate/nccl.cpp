/*
 * NCCL as far as the plugin uses it, for tests without a GPU: the same functions, between processes of this machine, in the order
 * of emulated streams. Bytes go through mailboxes in shared memory, one for each pair of ranks and direction, a little at a time,
 * so that nothing comes to an end before both sides are at it. A device has one operation at a time under way, of whatever communicator: that
 * two make progress side by side is promised nowhere, so ranks that begin them in different orders wait for each other. As a communicator that does not block, it says "in progress"
 * first and tells the outcome when asked. SPW_EMULATE_NCCL_FAIL=RANK:K: the K-th operation of that rank fails. Test code.
 */
#include "counts.h"
#include "nccl_abi.h"
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>
#include <atomic>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace
{
enum { RANKS_MAX = 8, BOX_BYTES = 4096 };

struct mailbox {
    std::atomic<uint64_t> written, taken;
    char bytes[BOX_BYTES];
};
struct meeting_place {
    std::atomic<uint32_t> joined;
    mailbox boxes[RANKS_MAX][RANKS_MAX]; /* from, to */
};

struct flow {
    bool send;
    int peer;
    char *at;
    size_t left;
};
} // namespace

struct ncclComm {
    meeting_place *place;
    char name[128];
    uint32_t rank, ranks, operations;
    bool said_so; /* that the last call is in progress */
    bool swapped; /* its pairs of ranks are connected */
    ncclComm *before;
    std::atomic<bool> aborted;
};

namespace
{
struct operation {
    ncclComm *comm;
    cudaStream_t stream;
    std::vector<flow> flows;
};
std::atomic<operation *> under_way; /* of this process' device */
std::atomic<uint32_t> gathers;
std::atomic<ncclComm *> last; /* that was made; none of them ever goes */
thread_local unsigned group_depth;
thread_local std::vector<operation *> group;

bool
move(ncclComm *c, flow *f)
{
    mailbox *box = f->send ? &c->place->boxes[c->rank][f->peer] : &c->place->boxes[f->peer][c->rank];
    uint64_t written = box->written, taken = box->taken, at = (f->send ? written : taken) % BOX_BYTES;
    size_t n = f->send ? BOX_BYTES - (written - taken) : written - taken;
    n = n < f->left ? n : f->left;
    n = n < BOX_BYTES - at ? n : BOX_BYTES - at;
    if (f->send)
        memcpy(box->bytes + at, f->at, n);
    else
        memcpy(f->at, box->bytes + at, n);
    (f->send ? box->written : box->taken) += n;
    f->at += n;
    f->left -= n;
    return n > 0;
}

/* As far as it goes now; a pair's flows in one direction follow each other. */
bool
try_operation(void *arg)
{
    operation *o = (operation *)arg, *none = NULL;
    bool left = false;
    if (!under_way.compare_exchange_strong(none, o) && none != o && !o->comm->aborted)
        return false;
    for (bool moved = true; moved && !o->comm->aborted;) {
        moved = left = false;
        for (size_t i = 0; i < o->flows.size(); i++) {
            bool first = true;
            for (size_t j = 0; j < i; j++)
                first = first && !(o->flows[j].left > 0 && o->flows[j].peer == o->flows[i].peer &&
                                   o->flows[j].send == o->flows[i].send);
            if (first && o->flows[i].left > 0)
                moved = move(o->comm, &o->flows[i]) || moved;
            left = left || o->flows[i].left > 0;
        }
    }
    if (left && !o->comm->aborted)
        return false;
    none = o;
    under_way.compare_exchange_strong(none, NULL);
    delete o;
    return true;
}

ncclResult_t
begin(operation *o)
{
    const char *fail = getenv("SPW_EMULATE_NCCL_FAIL");
    unsigned rank, k;
    ncclComm *c = o->comm;
    if (fail != NULL && sscanf(fail, "%u:%u", &rank, &k) == 2 && rank == c->rank && ++c->operations == k) {
        delete o;
        return ncclSystemError;
    }
    spw_emulate_submit(o->stream, try_operation, o);
    c->said_so = false;
    return ncclInProgress;
}

ncclResult_t
add(const void *buf, size_t bytes, int peer, bool send, ncclComm *comm, cudaStream_t stream)
{
    if (!comm->swapped && gathers > 0)
        return ncclSystemError; /* it would connect in the middle of a step: NCCL_RUNTIME_CONNECT does not hold for these */
    comm->swapped = true;
    if (group.empty())
        group.push_back(new operation{comm, stream, {}});
    group.back()->flows.push_back({send, peer, (char *)(uintptr_t)buf, bytes});
    return ncclInProgress; /* the real one says either */
}
} // namespace

extern "C" void spw_emulate_count(spw_emulate_counts *out);

EXPORT ncclResult_t
ncclGetVersion(int *version)
{
    *version = 22800;
    return ncclSuccess;
}

EXPORT const char *
ncclGetErrorString(ncclResult_t rc)
{
    return rc == ncclSystemError ? "emulated system error" : rc == ncclSuccess ? "no error" : "emulated error";
}

EXPORT ncclResult_t
ncclGetUniqueId(ncclUniqueId *id)
{
    static std::atomic<unsigned> count;
    int fd;
    memset(id, 0, sizeof *id);
    snprintf(id->internal, sizeof id->internal, "/spw-nccl-%d-%u", (int)getpid(), count++);
    (void)shm_unlink(id->internal); /* of a process that had this number before, and was killed */
    fd = shm_open(id->internal, O_CREAT | O_EXCL | O_RDWR, 0600);
    if (fd < 0 || ftruncate(fd, sizeof(meeting_place)) != 0)
        return ncclSystemError;
    close(fd);
    return ncclSuccess;
}

EXPORT ncclResult_t
ncclCommInitRankConfig(ncclComm_t *out, int ranks, ncclUniqueId id, int rank, ncclConfig_t *config)
{
    int fd = shm_open(id.internal, O_RDWR, 0600);
    void *at;
    ncclComm *c;
    const char *connect = getenv("NCCL_RUNTIME_CONNECT");
    spw_emulate_counts counts;
    spw_emulate_count(&counts);
    if (connect == NULL || strcmp(connect, "0") != 0 || counts.kernels == 0)
        return ncclSystemError; /* it would connect in the middle of a step, and wait for kernels that wait for it */
    if (fd < 0 || ranks > RANKS_MAX || config->magic != 0xcafebeef || config->blocking != 0)
        return ncclSystemError;
    at = mmap(NULL, sizeof(meeting_place), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (at == MAP_FAILED)
        return ncclSystemError;
    c = new ncclComm();
    c->place = (meeting_place *)at;
    memcpy(c->name, id.internal, sizeof c->name);
    c->rank = (uint32_t)rank;
    c->ranks = (uint32_t)ranks;
    c->before = last.exchange(c);
    if (++c->place->joined == c->ranks)
        shm_unlink(c->name);
    *out = c;
    return ncclInProgress;
}

EXPORT ncclResult_t
ncclCommGetAsyncError(ncclComm_t c, ncclResult_t *state)
{
    *state = c->place->joined < c->ranks || !c->said_so ? ncclInProgress : ncclSuccess;
    c->said_so = true;
    return ncclSuccess;
}

EXPORT ncclResult_t
ncclCommFinalize(ncclComm_t c)
{
    c->said_so = false;
    return ncclInProgress;
}

/* Operations may still point at it: it stays. */
EXPORT ncclResult_t
ncclCommDestroy(ncclComm_t)
{
    return ncclSuccess;
}

EXPORT ncclResult_t
ncclCommAbort(ncclComm_t c)
{
    c->aborted = true;
    if (c->place->joined < c->ranks)
        shm_unlink(c->name);
    return ncclSuccess;
}

EXPORT ncclResult_t
ncclGroupStart(void)
{
    group_depth++;
    return ncclSuccess;
}

EXPORT ncclResult_t
ncclGroupEnd(void)
{
    ncclResult_t rc = ncclSuccess;
    if (--group_depth > 0 || group.empty())
        return ncclSuccess;
    for (operation *o : group)
        rc = begin(o);
    group.clear();
    return rc;
}

EXPORT ncclResult_t
ncclSend(const void *buf, size_t count, ncclDataType_t, int peer, ncclComm_t comm, cudaStream_t stream)
{
    return add(buf, count, peer, true, comm, stream);
}

EXPORT ncclResult_t
ncclRecv(void *buf, size_t count, ncclDataType_t, int peer, ncclComm_t comm, cudaStream_t stream)
{
    return add(buf, count, peer, false, comm, stream);
}

EXPORT ncclResult_t
ncclAllGather(const void *send, void *recv, size_t count, ncclDataType_t, ncclComm_t comm, cudaStream_t stream)
{
    operation *o = new operation{comm, stream, {}};
    gathers++;
    if (send != (char *)recv + comm->rank * count) {
        delete o;
        return ncclSystemError; /* the plugin gathers in place */
    }
    for (uint32_t r = 0; r < comm->ranks; r++) {
        if (r == comm->rank)
            continue;
        o->flows.push_back({true, (int)r, (char *)(uintptr_t)send, count});
        o->flows.push_back({false, (int)r, (char *)recv + r * count, count});
    }
    return begin(o);
}
