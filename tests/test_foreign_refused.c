/*
 * Checkpoints of DeepSpeed, FSDP and llm.c that are damaged, incomplete, of another model or of what is not read are refused by what is wrong with
 * them; what is wrong with the optimizer's state alone keeps nobody from the weights.
 */
#include "lib_foreign.h"
#include "lib_tiny.h"
#include <isa-l/crc.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#include <cmocka.h>

static void
opens_not(const char *folder, spw_status st, const char *says)
{
    spw_foreign *d;
    foreign_err = (spw_error){0};
    if (spw_foreign_open(&d, folder, &foreign_err) != st || strstr(foreign_err.message, says) == NULL)
        fail_msg("\"%s\" should hold \"%s\"", foreign_err.message, says);
}

/* Its weights are there, and its optimizer's state is refused. */
static void
resumes_not(const char *folder, spw_status st, const char *says)
{
    spw_checkpoint_state state;
    spw_config c;
    spw_hf_reader *weights;
    spw_st_reader *moments;
    spw_foreign *d;
    spw_model *m;
    foreign_configure(&c, &foreign_checkpoints[FULL], 1, "", "");
    foreign_err = (spw_error){0};
    foreign_need(spw_model_from_config(&m, &c, &foreign_err));
    foreign_need(spw_foreign_open(&d, folder, &foreign_err));
    foreign_need(spw_foreign_weights(d, &weights, &foreign_err));
    assert_true(spw_hf_reader_count(weights) > 0);
    if (spw_foreign_check_state(d, &foreign_err) != st || strstr(foreign_err.message, says) == NULL)
        fail_msg("\"%s\" should hold \"%s\"", foreign_err.message, says);
    foreign_err = (spw_error){0};
    assert_int_equal(spw_foreign_moments(d, weights, m, NULL, 0, &moments, &foreign_err), st);
    assert_non_null(strstr(foreign_err.message, says));
    assert_null(moments);
    spw_hf_reader_close(weights);
    spw_foreign_close(d);
    spw_model_destroy(m);
    assert_int_equal(spw_foreign_read_state(folder, &c, &state, NULL), st);
}

static void
loads_not(const spw_config *c, const char *folder, spw_status st, const char *says)
{
    foreign_subject s = {.c = *c};
    foreign_err = (spw_error){0};
    if (foreign_begin(&s, folder, NULL, &foreign_err) != st || strstr(foreign_err.message, says) == NULL)
        fail_msg("%s: \"%s\" should hold \"%s\"", folder, foreign_err.message, says);
    foreign_end(&s);
}

/* All that is opened and found, without memory for one allocation or with one read that fails: refused, and nothing stays behind. */
static spw_status
look_at_all(const spw_model *m, const char *folder)
{
    static const char *const moments[] = {"exp_avg", "exp_avg_sq"};
    spw_foreign *d = NULL;
    spw_hf_reader *weights = NULL;
    spw_st_reader *r = NULL;
    spw_status st = spw_foreign_open(&d, folder, &foreign_err);
    if (st == SPW_OK)
        st = spw_foreign_weights(d, &weights, &foreign_err);
    if (st == SPW_OK)
        st = spw_hf_reader_bind(weights, m, &foreign_err);
    if (st == SPW_OK)
        st = spw_foreign_moments(d, weights, m, moments, 2, &r, &foreign_err);
    spw_st_reader_close(r);
    spw_hf_reader_close(weights);
    spw_foreign_close(d);
    return st;
}

static void
test_faults(void **state)
{
    static const int kinds[] = {FROZEN, TRAINER, FULL, LLMC_PARTS}; /* frozen parameters too */
    (void)state;
    for (int run = 0; run < 8; run++) {
        const foreign_checkpoint *k = &foreign_checkpoints[kinds[run / 2]];
        const char *folder = foreign_folder(k);
        bool calls = run % 2 == 1;
        unsigned n = SANITIZED ? 1 + (unsigned)run / 2 % 3 : 1; /* with them every third, of each folder others */
        bool fired = true;
        spw_config c;
        spw_model *m;
        foreign_configure(&c, k, 1, "", "");
        foreign_need(spw_model_from_config(&m, &c, &foreign_err));
        for (; fired; n += SANITIZED ? 3 : 1) {
            long live = spw_test_live_allocs();
            spw_status st;
            (calls ? spw_test_fail_call : spw_test_fail_alloc)(n);
            st = look_at_all(m, folder);
            fired = calls ? spw_test_call_fired() : spw_test_fault_fired();
            (calls ? spw_test_fail_call : spw_test_fail_alloc)(0);
            assert_int_equal(st != SPW_OK, fired);
            assert_int_equal(spw_test_live_allocs(), live);
        }
        assert_true(n > (calls ? 20u : 100u) / (k->llmc ? 4 : 1));
        spw_model_destroy(m);
    }
}

#define RANK_1 "/zero_pp_rank_1_mp_rank_00_optim_states.pt"

/* Replaces bytes of a file's pickle, the first time they are there or every time, and sets its checksum right. */
static void
patch(const char *path, const char *old, const char *new, size_t n, bool every)
{
    uint64_t bytes, begin, end;
    char *text = tiny_load(path, &bytes), *directory;
    uint32_t crc;
    bool done = false;
    memcpy(&crc, text + 26, 4); /* of name and extra field, behind a header of 30 bytes */
    begin = 30 + (crc & 0xffff) + (crc >> 16);
    directory = memmem(text, bytes, "PK\1\2", 4);
    assert_non_null(directory);
    memcpy(&crc, directory + 24, 4);
    end = begin + crc;
    for (uint64_t i = begin; i + n <= end && (every || !done); i++) {
        if (memcmp(text + i, old, n) != 0)
            continue;
        memcpy(text + i, new, n);
        done = true;
    }
    assert_true(done);
    crc = crc32_gzip_refl(0, (unsigned char *)text + begin, end - begin);
    memcpy(directory + 16, &crc, 4);
    tiny_store(path, text, bytes);
    free(text);
}

/* A client that gives DeepSpeed its configuration's file has that name in each checkpoint, and nothing else of it. */
static void
test_config_named(void **state)
{
    char dir[256], path[400];
    spw_foreign *d;
    spw_config c;
    (void)state;
    tiny_dir_make(dir);
    foreign_copy(&foreign_checkpoints[STAGE2], dir);
    snprintf(path, sizeof path, "%s/zero_pp_rank_0_mp_rank_00_optim_states.pt", dir);
    patch(path, "X\n\0\0\0ds_version", "U\tds_configN0N0", 15, false); /* the last one of that name counts: "0.19.8" */
    foreign_need(spw_foreign_open(&d, dir, &foreign_err));
    assert_null(spw_foreign_config(d));
    assert_string_equal(spw_foreign_get_about(d)->config_name, "0.19.8");
    spw_foreign_close(d);
    foreign_configure(&c, &foreign_checkpoints[STAGE2], 1, "", "");
    c.train_batch_size = 6; /* which nobody knows */
    c.accumulation = 2;
    c.optimizer.beta2 = 0.999;
    c.gradient_clipping = 0;
    foreign_compares(dir, &c, 2, "optimizer.params.betas: [0.9,0.95] in the checkpoint, [0.9,0.999] now\n");
    tiny_dir_remove(dir);
}

/* A vector that was decayed beside others that were not, as A_log is by a Trainer: the key for all vectors would be no help. */
static void
test_uneven_decay(void **state)
{
    char dir[256], path[400], *text, *without, *with;
    enum { ENTRY_BYTES = 1261 }; /* of each parameter's number; the first is a matrix's */
    uint64_t bytes;
    spw_config c;
    (void)state;
    tiny_dir_make(dir);
    foreign_copy(&foreign_checkpoints[TRAINER], dir);
    snprintf(path, sizeof path, "%s/optimizer_0/__1_0.distcp", dir);
    text = tiny_load(path, &bytes);
    with = memmem(text, bytes, "\x80\2G\x3f", 4);
    without = memmem(text, bytes, "\x80\2G\0", 4);
    assert_true(with != NULL && without != NULL);
    memcpy(without - (with - text), text, ENTRY_BYTES);
    tiny_store(path, text, bytes);
    free(text);
    foreign_configure(&c, &foreign_checkpoints[TRAINER], 1, "", "");
    foreign_compares(
        dir, &c, 1,
        "weight decay of model.layers.0.post_attention_layernorm.weight (spillway.param_groups): 0.1 in the "
        "checkpoint, 0 now\n");
    tiny_dir_remove(dir);
}

/* Sizes that do not go together, in pickles that are whole. 181 elements are the first sub-group's part of a rank, "K\xb5" in a pickle. */
static void
test_sizes(void **state)
{
    char dir[256], first[400], second[400];
    spw_foreign *d;
    (void)state;
    tiny_dir_make(dir);
    snprintf(first, sizeof first, "%s/zero_pp_rank_0_mp_rank_00_optim_states.pt", dir);
    snprintf(second, sizeof second, "%s/zero_pp_rank_1_mp_rank_00_optim_states.pt", dir);
    foreign_copy(&foreign_checkpoints[STAGE3], dir);
    patch(second, "K\xb5\x85", "K\xb4\x85", 3, false);
    opens_not(dir, SPW_ECORRUPT,
              "rank_1_mp_rank_00_optim_states.pt: the optimizer's state is shorter than its masters");
    foreign_copy(&foreign_checkpoints[STAGE3], dir);
    patch(second, "K\xb5\x85", "K\xb4\x85", 3, true);
    opens_not(dir, SPW_ECORRUPT, "rank_1_mp_rank_00_optim_states.pt: its masters are not as many as the first rank's");
    for (int r = 0; r < 3; r++) { /* all of them */
        foreign_copy(&foreign_checkpoints[STAGE3], dir);
        for (int k = 0; k < 3; k++) {
            char path[400];
            snprintf(path, sizeof path, "%s/zero_pp_rank_%d_mp_rank_00_optim_states.pt", dir, k);
            patch(path, "K\x0f\x85", r == 0 ? "K\x0e\x85" : "K\x0d\x85", 3, true); /* the last sub-group's 15 */
        }
        opens_not(dir, SPW_ECORRUPT, "elements of a flat array, and its files have");
    }
    foreign_copy(&foreign_checkpoints[STAGE3], dir);
    patch(first, "K\xb5\x85", "K\xb6\x85", 3, true);
    opens_not(dir, SPW_ECORRUPT, "lies outside of its storage");
    foreign_copy(&foreign_checkpoints[STAGE3],
                 dir); /* arrays with more than parameters, whose first one is (18, 8) now */
    snprintf(second, sizeof second, "%s/zero_pp_rank_0_mp_rank_00_model_states.pt", dir);
    patch(second, "K\x13K\x08\x86", "K\x12K\x08\x86", 5, false);
    opens_not(dir, SPW_ECORRUPT, "parameters take 438 elements of a flat array, and its files have 441");
    foreign_copy(&foreign_checkpoints[STAGE3], dir); /* a stage that the model's states are not of */
    patch(first, "K\x03\x85", "K\x02\x85", 3, false);
    opens_not(dir, SPW_ECORRUPT, "zero_stage is not 1, 2 or 3, or not that of the model's states");
    foreign_copy(&foreign_checkpoints[STAGE2], dir); /* the optimizer's own count of updates is what its moments know */
    {
        uint64_t bytes;
        char *text = tiny_load(first, &bytes), *four = memmem(text, bytes, "\0\0\x80\x40", 4);
        assert_non_null(four);
        memcpy(four, "\0\0\x40\x40", 4);
        tiny_store(first, text, bytes);
        free(text);
    }
    foreign_need(spw_foreign_open(&d, dir, &foreign_err));
    assert_int_equal(spw_foreign_get_about(d)->updates, 3);
    spw_foreign_close(d);
    tiny_dir_remove(dir);
}

/* Bytes of a file, the first time they are there or every time. */
static void
replace(const char *path, const char *old, const char *new, size_t n, bool every)
{
    uint64_t bytes;
    char *text = tiny_load(path, &bytes), *at = memmem(text, bytes, old, n);
    assert_non_null(at);
    for (; at != NULL; at = every ? memmem(at, bytes - (uint64_t)(at - text), old, n) : NULL)
        memcpy(at, new, n);
    tiny_store(path, text, bytes);
    free(text);
}

/* PyTorch's: files and chunks that are missing, cut off, or not what .metadata says. */
static void
test_fsdp_refused(void **state)
{
    char dir[256], path[400], metadata[400];
    uint64_t bytes;
    char *text;
    (void)state;
    tiny_dir_make(dir);
    snprintf(metadata, sizeof metadata, "%s/.metadata", dir);
    snprintf(path, sizeof path, "%s/__1_0.distcp", dir);
    foreign_copy(&foreign_checkpoints[FSDP], dir);
    assert_int_equal(unlink(path), 0);
    opens_not(dir, SPW_ENOENT, "__1_0.distcp: No such file");
    foreign_copy(&foreign_checkpoints[FSDP], dir);
    text = tiny_load(path, &bytes);
    for (uint64_t n = 0; n < bytes; n += 9973) {
        tiny_store(path, text, n);
        opens_not(dir, SPW_ECORRUPT, "__1_0.distcp");
    }
    free(text);
    foreign_copy(&foreign_checkpoints[FSDP], dir);
    text = tiny_load(metadata, &bytes);
    for (uint64_t n = 0; n < bytes; n += 997) {
        tiny_store(metadata, text, n);
        opens_not(dir, SPW_ECORRUPT, ".metadata: damaged pickle");
    }
    free(text);
    foreign_copy(&foreign_checkpoints[FSDP], dir); /* the embeddings' size: 19 rows of 8, in chunks of 7, 7 and 5 */
    replace(metadata, "K\x13K\x08\x86", "K\x14K\x08\x86", 5, false);
    opens_not(dir, SPW_ECORRUPT, "its chunks are not all of its rows");
    foreign_copy(&foreign_checkpoints[FSDP], dir);
    replace(metadata, "K\x13K\x08\x86", "K\x13K\x09\x86", 5, false);
    opens_not(dir, SPW_EUNSUPPORTED, "is not cut by rows alone");
    foreign_copy(&foreign_checkpoints[FSDP], dir);
    replace(metadata, "K\x07K\x00\x86", "K\x06K\x00\x86", 5, false); /* a chunk that begins a row early */
    opens_not(dir, SPW_ECORRUPT, "its chunks leave rows out, or have some twice");
    foreign_copy(&foreign_checkpoints[FSDP], dir);
    text = tiny_load(metadata, &bytes); /* places come last: that of a chunk is another's now */
    for (uint64_t i = bytes - 5; i > 0; i--) {
        if (memcmp(text + i, "K\x07K\x00\x86", 5) == 0) {
            text[i + 1] = 6;
            break;
        }
    }
    tiny_store(metadata, text, bytes);
    free(text);
    opens_not(dir, SPW_ECORRUPT, "a chunk of it has no place");
    foreign_copy(&foreign_checkpoints[FSDP], dir);
    replace(metadata, "K\x07K\x08\x86", "K\x06K\x08\x86", 5, false);
    opens_not(dir, SPW_ECORRUPT, "a chunk has another shape than .metadata says");
    foreign_copy(&foreign_checkpoints[FSDP], dir);
    replace(metadata, "\x8c\x03\x66qn", "\x8c\x03gqn", 5, false); /* a member of what says which tensor lies where */
    opens_not(dir, SPW_ECORRUPT, "a place without a name");
    foreign_copy(&foreign_checkpoints[FSDP], dir); /* one parameter's moment by another name */
    replace(metadata, "layers.0.self_attn.k_proj.weight.exp_avg_sq\x94",
            "layers.0.self_attn.k_proj.weight.exp_avg_sr\x94", 44, true);
    opens_not(dir, SPW_ECORRUPT, "the optimizer has not all of what it has of others");
    foreign_copy(&foreign_checkpoints[FSDP], dir); /* moments of (4, 8) and (8, 8) change places */
    replace(metadata, "layers.0.self_attn.k_proj.weight.exp_avg\x94", "layers.0.self_attn.x_proj.weight.exp_avg\x94",
            41, true);
    replace(metadata, "layers.0.self_attn.q_proj.weight.exp_avg\x94", "layers.0.self_attn.k_proj.weight.exp_avg\x94",
            41, true);
    replace(metadata, "layers.0.self_attn.x_proj.weight.exp_avg\x94", "layers.0.self_attn.q_proj.weight.exp_avg\x94",
            41, true);
    opens_not(dir, SPW_ECORRUPT, "it has another shape than the parameter's other moments");
    foreign_copy(&foreign_checkpoints[FSDP], dir); /* weights do */
    replace(metadata, "model.model.layers.0.self_attn.k_proj.weight\x94",
            "model.model.layers.0.self_attn.x_proj.weight\x94", 45, true);
    replace(metadata, "model.model.layers.0.self_attn.q_proj.weight\x94",
            "model.model.layers.0.self_attn.k_proj.weight\x94", 45, true);
    replace(metadata, "model.model.layers.0.self_attn.x_proj.weight\x94",
            "model.model.layers.0.self_attn.q_proj.weight\x94", 45, true);
    opens_not(dir, SPW_ECORRUPT, "it has another shape than its moments");
    foreign_copy(&foreign_checkpoints[FSDP], dir);
    replace(metadata, "state_dict_metadata", "state_dict_metadatb", 19, false);
    opens_not(dir, SPW_ECORRUPT, "it describes no tensors");
    opens_not(VECTORS "fsdp/twice", SPW_EUNSUPPORTED,
              "there are weights twice, as a.w and b.w; which are trained is not known");
    resumes_not(VECTORS "fsdp/half", SPW_EUNSUPPORTED, "state.w.exp_avg is BF16; moments in fp32 are read");
    tiny_dir_remove(dir);
}

/* Who saved the model alone: weights by the names that they have beside an optimizer's state, wherever these begin, and no resuming. */
static void
test_fsdp_weights(void **state)
{
    const spw_tensor_info *t;
    char dir[256], path[400];
    spw_hf_reader *whole, *alone;
    spw_foreign *d, *w;
    float x[19 * 8], y[19 * 8];
    (void)state;
    tiny_dir_make(dir);
    foreign_need(spw_foreign_open(&w, VECTORS "fsdp/trainer", &foreign_err));
    foreign_need(spw_foreign_weights(w, &whole, &foreign_err));
    for (int tied = 0; tied < 2;
         tied++) { /* tied: no head that "model.norm.weight" would have only "model." in common with */
        foreign_copy(&foreign_checkpoints[TRAINER], dir);
        snprintf(path, sizeof path, "%s/optimizer_0/.metadata", dir);
        assert_int_equal(unlink(path), 0);
        snprintf(path, sizeof path, "%s/pytorch_model_fsdp_0/.metadata", dir);
        if (tied)
            replace(path, "model.lm_head.weight", "model.model.heads.ht", 20, true);
        resumes_not(dir, SPW_ENOENT, "it holds no optimizer's state");
        foreign_need(spw_foreign_open(&d, dir, &foreign_err));
        foreign_need(spw_foreign_weights(d, &alone, &foreign_err));
        assert_int_equal(spw_hf_reader_count(alone), spw_hf_reader_count(whole));
        for (uint32_t i = tied ? 2 : 0; i < spw_hf_reader_count(whole);
             i++) { /* head and embeddings are the first by name */
            t = spw_hf_reader_tensor(whole, i, NULL);
            assert_string_equal(spw_hf_reader_tensor(alone, i, NULL)->name, t->name);
            foreign_need(spw_hf_read(whole, i, 0, x, t->bytes, &foreign_err));
            foreign_need(spw_hf_read(alone, i, 0, y, t->bytes, &foreign_err));
            assert_memory_equal(x, y, t->bytes);
        }
        spw_hf_reader_close(alone);
        spw_foreign_close(d);
    }
    spw_hf_reader_close(whole);
    spw_foreign_close(w);
    tiny_dir_remove(dir);
}

/*
 * A full state dict of which something is missing, or is no such thing. What is wrong with the optimizer's state alone keeps nobody from
 * the weights.
 */
static void
test_full_refused(void **state)
{
    static const struct {
        const char *file, *says;
        spw_status st;
    } cases[] = {{"half", "exp_avg of model.embed_tokens.weight is BF16; moments in fp32 are read", SPW_EUNSUPPORTED},
                 {"missing", "q_proj.weight: the optimizer has not all of what it has of others", SPW_ECORRUPT},
                 {"steps", "model.embed_tokens.weight: it has no number of updates", SPW_ECORRUPT}};
    char dir[256], path[400], found[400], command[900];
    uint64_t bytes;
    char *text;
    spw_foreign *d;
    (void)state;
    tiny_dir_make(dir);
    snprintf(path, sizeof path, "%s/optimizer.bin", dir);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        foreign_copy(&foreign_checkpoints[FULL], dir);
        snprintf(command, sizeof command, "cp " VECTORS "fsdp/broken/%s.bin %s", cases[i].file, path);
        assert_int_equal(system(command), 0);
        resumes_not(dir, cases[i].st, cases[i].says);
    }
    for (size_t i = 0; i < 2; i++) {
        snprintf(command, sizeof command, "cp " VECTORS "fsdp/broken/%s.bin %s", i == 0 ? "numbers" : "stateless",
                 path);
        assert_int_equal(system(command), 0);
        assert_false(spw_foreign_find(dir, found, sizeof found));
    }
    foreign_copy(&foreign_checkpoints[FULL], dir);
    patch(path, "model.norm.weight", "model.norm.weighs", 17, true);
    resumes_not(dir, SPW_ECORRUPT, "model.norm.weighs: there are no weights of this name");
    foreign_copy(&foreign_checkpoints[FULL], dir);
    patch(path, "K\x13K\x08\x86", "K\x12K\x08\x86", 5, false);
    resumes_not(dir, SPW_ECORRUPT, "model.embed_tokens.weight: it has another shape than its weights");
    foreign_copy(&foreign_checkpoints[FULL], dir);
    text = tiny_load(path, &bytes);
    for (uint64_t n = 0; n < bytes; n += 997) {
        tiny_store(path, text, n);
        assert_true(spw_foreign_find(dir, found, sizeof found));
        foreign_need(spw_foreign_open(&d, dir, &foreign_err));
        assert_int_not_equal(spw_foreign_check_state(d, &foreign_err), SPW_OK);
        assert_non_null(strstr(foreign_err.message, path));
        foreign_err = (spw_error){0};
        spw_foreign_close(d);
    }
    free(text);
    tiny_dir_remove(dir);
}

/* Without the optimizer's "step", of which torch.optim.SGD has none: a schedule and data would begin again. */
static void
test_uncounted(void **state)
{
    char dir[256], path[400], *text;
    uint64_t bytes;
    (void)state;
    tiny_dir_make(dir);
    foreign_copy(&foreign_checkpoints[FSDP], dir);
    snprintf(path, sizeof path, "%s/.metadata", dir);
    text = tiny_load(path, &bytes);
    for (char *at = text; (at = memmem(at, bytes - (uint64_t)(at - text), ".step", 5)) != NULL; at++) {
        char *key = at;
        while (memcmp(key, "optim", 5) != 0)
            key--;
        *key = 'x'; /* no key of an optimizer's */
    }
    tiny_store(path, text, bytes);
    free(text);
    resumes_not(dir, SPW_EUNSUPPORTED, "its optimizer has not counted its updates");
    tiny_dir_remove(dir);
}

static void
test_refused(void **state)
{
    char dir[256], path[400], other[400], found[SPW_PATH_BYTES];
    spw_config c;
    uint64_t bytes;
    char *text;
    (void)state;
    tiny_dir_make(dir);
    assert_false(spw_foreign_find(dir, found, sizeof found));
    opens_not(dir, SPW_ENOENT, "no *_optim_states.pt");
    foreign_copy(&foreign_checkpoints[STAGE2], dir);
    assert_true(spw_foreign_find(dir, found, sizeof found));
    snprintf(path, sizeof path, "%s" RANK_1, dir);
    snprintf(other, sizeof other, "%s/zero_pp_rank_2_mp_rank_00_optim_states.pt", dir);
    assert_int_equal(unlink(path), 0);
    opens_not(dir, SPW_ENOENT, "zero_pp_rank_1_mp_rank_00_optim_states.pt");
    assert_int_equal(unlink(other), 0);
    opens_not(dir, SPW_ECORRUPT, "was written by 3 ranks, and there are files of 1");
    foreign_copy(&foreign_checkpoints[STAGE2], dir);
    snprintf(other, sizeof other, "%s/zero_pp_rank_0_mp_rank_01_optim_states.pt", dir);
    tiny_store(other, "x", 1);
    opens_not(dir, SPW_EUNSUPPORTED, "cut into 2 parts");
    foreign_copy(&foreign_checkpoints[STAGE2], dir);
    snprintf(other, sizeof other, "%s/mp_rank_00_model_states.pt", dir);
    assert_int_equal(unlink(other), 0);
    opens_not(dir, SPW_ENOENT, "model_states.pt");
    foreign_copy(&foreign_checkpoints[STAGE2], dir); /* a rank's file of stage 3 among those of stage 2 */
    snprintf(other, sizeof other, "%s" RANK_1, foreign_folder(&foreign_checkpoints[STAGE3]));
    text = tiny_load(other, &bytes);
    tiny_store(path, text, bytes);
    free(text);
    opens_not(dir, SPW_ECORRUPT, "masters of the optimizer's groups are missing");
    foreign_copy(&foreign_checkpoints[STAGE3], dir); /* of two groups among four */
    snprintf(other, sizeof other, "%s" RANK_1, foreign_folder(&foreign_checkpoints[STAGE2]));
    text = tiny_load(other, &bytes);
    tiny_store(path, text, bytes);
    opens_not(dir, SPW_ECORRUPT, "masters of the optimizer's groups are missing");
    tiny_store(path, text, bytes / 2);
    opens_not(dir, SPW_ECORRUPT, "zero_pp_rank_1_mp_rank_00_optim_states.pt: it ends before");
    free(text);
    foreign_copy(&foreign_checkpoints[NVME], dir);
    snprintf(other, sizeof other, "%s/offloaded_tensors/rank01/exp_avg-0_1.tensor.swp", dir);
    assert_int_equal(truncate(other, 640), 0);
    opens_not(dir, SPW_ECORRUPT, "exp_avg-0_1.tensor.swp has 640 bytes, and its parameters take 648");
    assert_int_equal(unlink(other), 0);
    opens_not(dir, SPW_ENOENT, "rank01/exp_avg-0_1.tensor.swp");
    foreign_configure(&c, &foreign_checkpoints[STAGE2], 1, "", "");
    snprintf(c.optimizer.type, sizeof c.optimizer.type, "SGD");
    c.optimizer.momentum = 0.9;
    loads_not(&c, foreign_folder(&foreign_checkpoints[STAGE2]), SPW_ECONFIG,
              "has no momentum_buffer, which this configuration's needs; it keeps: exp_avg, exp_avg_sq");
    foreign_configure(&c, &foreign_checkpoints[FROZEN], 1, "", "");
    c.run.freeze.count = 1;
    loads_not(&c, foreign_folder(&foreign_checkpoints[FROZEN]), SPW_EUNSUPPORTED,
              "layers.0.mlp.up_proj.weight was frozen there");
    foreign_configure(&c, &foreign_checkpoints[STAGE2], 1, "", "");
    c.model.layers = 3;
    loads_not(&c, foreign_folder(&foreign_checkpoints[STAGE2]), SPW_ECORRUPT, "tensor model.layers.2");
    tiny_dir_remove(dir);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_faults),       cmocka_unit_test(test_config_named), cmocka_unit_test(test_uneven_decay),
        cmocka_unit_test(test_sizes),        cmocka_unit_test(test_fsdp_refused), cmocka_unit_test(test_fsdp_weights),
        cmocka_unit_test(test_full_refused), cmocka_unit_test(test_uncounted),    cmocka_unit_test(test_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
