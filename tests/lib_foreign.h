/*
 * lib_foreign - the checkpoints in tests/vectors that DeepSpeed, FSDP and llm.c's description made, configurations that go on from them, and
 * copies to be spoiled. All but begin fail the running test where something is not as it should be.
 */
#ifndef LIB_FOREIGN_H
#define LIB_FOREIGN_H

#include "engine_internal.h"
#include "spw_files.h"

enum { LENGTH = 8, SAVED = 4 };
#define VECTORS "tests/vectors/"

typedef struct foreign_checkpoint {
    const char *name;
    uint32_t stage, ranks;
    uint64_t skipped; /* of SAVED steps, without an update */
    bool groups, frozen, moments_unknown;
    const char *precision; /* a member of the configuration; NULL: none */
    const char *format;    /* of the state here; NULL: fp32 */
    const char *model;     /* NULL: a small Llama */
    bool experts;          /* a small gpt-oss */
    uint32_t tensors;      /* 0: as many as the Llama has */
    bool fsdp;             /* PyTorch's; not clipped, one learning rate */
    bool llmc;             /* of a GPT-2; one learning rate */
    uint32_t batch;        /* sequences of a step; 0: as many as ranks */
} foreign_checkpoint;

extern const foreign_checkpoint foreign_checkpoints[];
enum {
    STAGE2 = 1,
    FP16 = 3,
    STAGE3 = 7,
    NVME = 8,
    FROZEN = 9,
    FSDP = 11,
    TRAINER = 12,
    FULL = 13,
    LLMC = 15,
    LLMC_PARTS = 16,
    FOREIGN_COUNT = 20
};

extern spw_error foreign_err; /* of the last call */
void foreign_need(spw_status st);

/* What goes on from a checkpoint, on so many ranks; more: members of it, each with a comma behind; spillway: of that section. */
void
foreign_configure(spw_config *c, const foreign_checkpoint *k, uint32_t ranks, const char *more, const char *spillway);
/* Its folder, as the file "latest" says, or llm.c's model of the last step. */
const char *foreign_folder(const foreign_checkpoint *k);
/* A copy of that folder in the folder to, in which nothing else is left. */
void foreign_copy(const foreign_checkpoint *k, const char *to);
/* Comparing tells so many differences, and this among them. */
void foreign_compares(const char *folder, const spw_config *c, uint32_t count, const char *says);

/* An engine on one rank that goes on from a checkpoint. */
typedef struct foreign_subject {
    spw_config c;
    spw_model *model;
    spw_engine *e;
} foreign_subject;
spw_status foreign_begin(foreign_subject *s, const char *folder, spw_comm *comm, spw_error *err);
void foreign_end(foreign_subject *s);

#endif
