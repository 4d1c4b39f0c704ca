/* Small models, fixed batches and configurations for tests that train. */
#ifndef LIB_TINY_H
#define LIB_TINY_H

#include "emulate/counts.h"
#include "spw_engine.h"

/* Sanitizers multiply memory, and emulated kernels take them many times as long. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define SANITIZED 1
#endif
#endif
#ifndef SANITIZED
#define SANITIZED 0
#endif

/* Fails the test with the message of the caller's err unless the call is SPW_OK. */
#define DONE(call)                                                                                                     \
    do {                                                                                                               \
        if ((call) != SPW_OK)                                                                                          \
            fail_msg("%s", err.message);                                                                               \
    } while (0)

/* Defaults of a run: cpu device, stage 3, everything on host, AdamW with clipping, state format fp32. */
void tiny_config(spw_config *c, spw_state_format format);
void tiny_muon(spw_config *c); /* in place of what tiny_config() sets */
void tiny_model_config(spw_model_config *m, spw_family family);
/* Of Gemma 4 that is its mixture; this is the size with embeddings of each layer and layers that read another's keys. */
#define TINY_GEMMA4_SMALL SPW_FAMILY_COUNT
#define TINY_FEW_KEYS                                                                                                  \
    ((spw_family)(SPW_FAMILY_COUNT + 1)) /* GLM-5 whose indexers choose 7 keys, also for the layer between */
#define TINY_EVEN_CHANNELS ((spw_family)(SPW_FAMILY_COUNT + 2)) /* Kimi Linear of four heads */
const char *tiny_family_name(spw_family family);
/* What folders tests/vectors/families has, in the order of their names. */
const char *const *tiny_family_vectors(uint32_t *count);
/* Once layers and vocabulary were changed: as many of the last layers read another's keys as can. */
void tiny_model_fit(spw_model_config *m);
/* Token t of sequence position i of step s: a fixed pseudo-text. */
void tiny_batch(uint64_t step, uint64_t vocab, uint64_t n, int32_t *tokens, int32_t *targets);
/* Makes pairs of answers of it, in sequences of T tokens, of four tokens each; the last ones of a sequence may be padding. reference (n): for them. */
void tiny_pairs(uint64_t n, uint64_t T, int32_t *tokens, int32_t *targets, double *reference);
/* And the configuration, by one of three rules. */
void tiny_prefer(spw_config *c, uint32_t rule);
/* A fresh folder below $TMPDIR or /tmp; removed by tiny_dir_remove. */
void tiny_dir_make(char path[256]);
void tiny_dir_remove(const char *path);
/* The bytes of a file of at most a MiB, to be freed; and a file of bytes. */
char *tiny_load(const char *path, uint64_t *bytes);
void tiny_store(const char *path, const char *text, uint64_t bytes);
uint32_t tiny_dir_entries(const char *path); /* but for those that begin with a dot */
enum { TINY_PROCESS_BYTES = 8 << 20 };       /* what tiny_train's plans count for the process */
/* A spillway.host_memory with which about half of what this configuration has on nvme goes to host memory, at least a part. */
uint64_t tiny_half_budget(const spw_config *c, spw_family family);
/* Sets the device's budget with which it keeps about half of what blocks compute between checkpoints of activations. */
void tiny_keep_half(spw_config *c, spw_family family);
/* Sets device and host budgets with which checkpoints of activations lie in all three tiers; it has an nvme_path. */
void tiny_mix_activations(spw_config *c, spw_family family);
/* Runs steps and writes the losses; then a digest of all weights and records. Fails the test on any error. */
uint64_t tiny_train(const spw_config *c, spw_family family, uint32_t steps, double *losses);
uint64_t tiny_digest(spw_engine *e);
/* The path of the only swap file below dir; of rank 0. */
void tiny_swap_file(const char *dir, char path[1024]);
/* Changes a byte of each of its pages, from the one at first on. */
void tiny_spoil_file(const char *path, uint64_t first);
/* For SPW_SWEEP_INIT of an engine in fp32, which is ctx: weights of which one is not a number. */
spw_status tiny_one_nan(void *ctx, uint32_t chunk_idx, void *weights, void *record, const void *grad, spw_error *err);
/* Waits until what an update or an edit writes behind its back lies on nvme. */
void tiny_settle(spw_store *store);
/* Makes the emulated plugin of this build the device cuda; false where there was no C++ compiler. */
bool tiny_emulated_device(void);
/* And its NCCL, for so many devices. */
bool tiny_emulated_links(const char *devices);
/* The path of a file among them; false: it is not there. */
enum { TINY_PATH_BYTES = 1200 };
bool tiny_emulated_file(char path[TINY_PATH_BYTES], const char *name);
/* What its streams were given so far; the device is open. */
spw_emulate_counts tiny_emulated_counts(void);
/* Has its k-th allocation or event from now on refused; 0: none. Whether what was asked for before has happened. */
bool tiny_emulated_refuse(unsigned k);

#endif
