/*
 * What this plugin uses of NCCL, declared here: the library is opened at run time, so its header need not be there to build.
 * Types, values and signatures are those of NCCL's documentation from 2.18 on, which later versions take as they are: the
 * configuration says its own size and version.
 */
#ifndef SPW_NCCL_ABI_H
#define SPW_NCCL_ABI_H

#include <cuda_runtime.h>
#include <limits.h>
#include <stddef.h>

typedef struct ncclComm *ncclComm_t;
typedef struct ncclUniqueId {
    char internal[128];
} ncclUniqueId;
typedef int ncclResult_t;
enum { ncclSuccess = 0, ncclSystemError = 2, ncclRemoteError = 6, ncclInProgress = 7 };
typedef int ncclDataType_t;
enum { ncclChar = 0 };
enum { NCCL_LEAST_VERSION = 21800 };

typedef struct ncclConfig_t {
    size_t size;
    unsigned magic, version;
    int blocking, cgaClusterSize, minCTAs, maxCTAs;
    const char *netName;
    int splitShare;
} ncclConfig_t;
#define NCCL_CONFIG_FOR_US                                                                                             \
    {                                                                                                                  \
        sizeof(ncclConfig_t), 0xcafebeef, 21800, 0, INT_MIN, INT_MIN, INT_MIN, NULL, INT_MIN                           \
    }

#define NCCL_FUNCTIONS(X)                                                                                              \
    X(ncclGetVersion, (int *version))                                                                                  \
    X(ncclGetUniqueId, (ncclUniqueId * id))                                                                            \
    X(ncclCommInitRankConfig, (ncclComm_t * comm, int ranks, ncclUniqueId id, int rank, ncclConfig_t *config))         \
    X(ncclCommGetAsyncError, (ncclComm_t comm, ncclResult_t * state))                                                  \
    X(ncclCommFinalize, (ncclComm_t comm))                                                                             \
    X(ncclCommDestroy, (ncclComm_t comm))                                                                              \
    X(ncclCommAbort, (ncclComm_t comm))                                                                                \
    X(ncclGroupStart, (void))                                                                                          \
    X(ncclGroupEnd, (void))                                                                                            \
    X(ncclAllGather,                                                                                                   \
      (const void *send, void *recv, size_t count, ncclDataType_t type, ncclComm_t comm, cudaStream_t stream))         \
    X(ncclSend, (const void *buf, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream))  \
    X(ncclRecv, (void *buf, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream))

#endif
