/*
 * Checkpoints of DeepSpeed and FSDP are read as they read them: ZeRO stages 1 to 3, torch.distributed.checkpoint, full states. The files in
 * tests/vectors were written by them (make_foreign_vectors.py), and what must be read of them was taken from their own accessors. llm.c's were
 * written there by their description, of a model that PyTorch trained.
 */
#include "lib_ranks.h"
#include "lib_tiny.h"
#include "engine_internal.h"
#include "spw_access.h"
#include "spw_files.h"
#include <isa-l/crc.h>
#include <jansson.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#include <cmocka.h>

enum { LENGTH = 8, SAVED = 4, STEPS = 8, ELEMS_MAX = 4096 };
#define VECTORS "tests/vectors/"

static spw_error err;

static void
need(spw_status st)
{
    if (st != SPW_OK)
        fail_msg("%s", err.message);
}

/* What must be read, fp32; *count: elements. */
static spw_status
find_expected(const char *name, const char *tensor, float out[ELEMS_MAX], uint64_t *count, spw_error *e)
{
    char path[200];
    spw_st_reader *r;
    const spw_tensor_info *t;
    spw_status st;
    snprintf(path, sizeof path, VECTORS "%s/expect.safetensors", strncmp(name, "fsdp/", 5) == 0 ? "fsdp" : name);
    SPW_TRY(spw_st_reader_open(&r, path, e));
    t = spw_st_reader_find(r, tensor);
    st = t != NULL && t->dtype == SPW_F32 && t->bytes <= ELEMS_MAX * sizeof *out
             ? spw_st_read(r, t, 0, out, t->bytes, e)
             : SPW_RAISE(e, SPW_ENOENT, "%s of %s", tensor, path);
    *count = t != NULL ? t->bytes / 4 : 0;
    spw_st_reader_close(r);
    return st;
}

static void
expected(const char *name, const char *tensor, float out[ELEMS_MAX], uint64_t *count)
{
    need(find_expected(name, tensor, out, count, &err));
}

static void
same_bytes(const char *what, const char *tensor, const void *got, const void *want, uint64_t bytes)
{
    if (memcmp(got, want, bytes) != 0)
        fail_msg("%s: %s differs", what, tensor);
}

/* ---------------------------------------------------------------- checkpoints of DeepSpeed */

typedef struct checkpoint {
    const char *name;
    uint32_t stage, ranks;
    uint64_t updates;
    bool groups, frozen, moments; /* moments: they are known */
    const char *precision;        /* a member of the configuration */
    const char *format;           /* of the state here */
    const char *model;            /* NULL: a small Llama */
    bool experts;                 /* a small gpt-oss */
    uint32_t tensors;             /* 0: as many as the Llama has */
    bool fsdp;                    /* PyTorch's; not clipped, one learning rate */
    bool llmc;                    /* of a GPT-2; one learning rate */
    uint32_t batch;               /* sequences of a step; 0: as many as ranks */
} checkpoint;

#define GLM4_MOE                                                                                                       \
    "{\"model_type\":\"glm4_moe\",\"hidden_size\":8,\"intermediate_size\":12,\"num_hidden_layers\":1,"                 \
    "\"num_attention_heads\":2,\"num_key_value_heads\":1,\"head_dim\":4,\"vocab_size\":19,"                            \
    "\"partial_rotary_factor\":0.5,\"max_position_embeddings\":16,\"rms_norm_eps\":1e-5,"                              \
    "\"tie_word_embeddings\":false,\"n_routed_experts\":3,\"num_experts_per_tok\":2,"                                  \
    "\"moe_intermediate_size\":5,\"first_k_dense_replace\":0,\"n_group\":1,\"topk_group\":1,"                          \
    "\"n_shared_experts\":1,\"routed_scaling_factor\":1.5}"
#define GEMMA4                                                                                                         \
    "{\"model_type\":\"gemma4_text\",\"hidden_size\":8,\"intermediate_size\":12,\"num_hidden_layers\":2,"              \
    "\"num_attention_heads\":2,\"num_key_value_heads\":1,\"head_dim\":4,\"global_head_dim\":8,"                        \
    "\"num_global_key_value_heads\":2,\"attention_k_eq_v\":true,\"sliding_window\":5,\"vocab_size\":19,"               \
    "\"layer_types\":[\"sliding_attention\",\"full_attention\"],\"max_position_embeddings\":16,"                       \
    "\"rms_norm_eps\":1e-5,\"hidden_size_per_layer_input\":0,\"enable_moe_block\":true,\"num_experts\":3,"             \
    "\"top_k_experts\":2,\"moe_intermediate_size\":5}"
#define NEOX                                                                                                           \
    "{\"model_type\":\"gpt_neox\",\"hidden_size\":8,\"intermediate_size\":12,\"num_hidden_layers\":1,"                 \
    "\"num_attention_heads\":2,\"vocab_size\":19,\"max_position_embeddings\":16,\"rotary_pct\":0.5,"                   \
    "\"tie_word_embeddings\":false}"

#define MIXTRAL                                                                                                        \
    "{\"model_type\":\"mixtral\",\"hidden_size\":8,\"intermediate_size\":5,\"num_hidden_layers\":1,"                   \
    "\"num_attention_heads\":2,\"num_key_value_heads\":1,\"vocab_size\":19,\"max_position_embeddings\":16,"            \
    "\"rms_norm_eps\":1e-5,\"tie_word_embeddings\":false,\"num_local_experts\":2,\"num_experts_per_tok\":2,"           \
    "\"rope_theta\":1e6}"

static const checkpoint checkpoints[] = {
    {.name = "deepspeed/stage1_bf16",
     .stage = 1,
     .ranks = 2,
     .updates = 4,
     .moments = true,
     .precision = "\"bf16\":{\"enabled\":true},",
     .format = "mixed"},
    {.name = "deepspeed/stage2",
     .stage = 2,
     .ranks = 3,
     .updates = 4,
     .groups = true,
     .moments = true,
     .precision = "",
     .format = "fp32"},
    {.name = "deepspeed/stage2_elastic",
     .stage = 2,
     .ranks = 3,
     .updates = 4,
     .groups = true,
     .precision = "",
     .format = "fp32"},
    {.name = "deepspeed/stage2_fp16_frozen",
     .stage = 2,
     .ranks = 2,
     .updates = 1,
     .frozen = true,
     .moments = true,
     .precision = "\"fp16\":{\"enabled\":true,\"initial_scale_power\":19,\"hysteresis\":1},",
     .format = "mixed-fp16"},
    /* with padding behind parameters, and experts in one tensor */
    {.name = "deepspeed/stage2_experts",
     .stage = 2,
     .ranks = 2,
     .updates = 4,
     .moments = true,
     .precision = "",
     .format = "fp32",
     .experts = true,
     .tensors = 16},
    /* of transformers 5: a layer's experts in one tensor, and a buffer that is not trained; and another name of the head in memory */
    {.name = "deepspeed/stage2_buffers",
     .stage = 2,
     .ranks = 2,
     .updates = 4,
     .moments = true,
     .precision = "",
     .format = "fp32",
     .model = GLM4_MOE,
     .tensors = 16},
    {.name = "deepspeed/stage3_neox",
     .stage = 3,
     .ranks = 2,
     .updates = 4,
     .moments = true,
     .precision = "",
     .format = "fp32",
     .model = NEOX,
     .tensors = 16},
    {.name = "deepspeed/stage3",
     .stage = 3,
     .ranks = 3,
     .updates = 4,
     .groups = true,
     .moments = true,
     .precision = "",
     .format = "fp32"},
    {.name = "deepspeed/stage3_nvme",
     .stage = 3,
     .ranks = 3,
     .updates = 4,
     .groups = true,
     .moments = true,
     .precision = "",
     .format = "fp32"},
    {.name = "deepspeed/stage3_bf16_frozen",
     .stage = 3,
     .ranks = 3,
     .updates = 4,
     .frozen = true,
     .moments = true,
     .precision = "\"bf16\":{\"enabled\":true},",
     .format = "split"},
    {.name = "deepspeed/stage1_bf16_fp32_sums",
     .stage = 1,
     .ranks = 2,
     .updates = 4,
     .groups = true,
     .moments = true,
     .precision = "\"bf16\":{\"enabled\":true},",
     .format = "mixed"},
    {.name = "fsdp/checkpoint",
     .ranks = 3,
     .updates = 4,
     .groups = true,
     .frozen = true,
     .moments = true,
     .precision = "",
     .format = "fp32",
     .fsdp = true},
    {.name = "fsdp/trainer",
     .ranks = 3,
     .updates = 4,
     .groups = true,
     .frozen = true,
     .moments = true,
     .precision = "",
     .format = "fp32",
     .fsdp = true},
    {.name = "fsdp/full",
     .ranks = 1,
     .updates = 4,
     .groups = true,
     .frozen = true,
     .moments = true,
     .precision = "",
     .format = "fp32",
     .fsdp = true,
     .batch = 3},
    {.name = "fsdp/full_hf",
     .ranks = 1,
     .updates = 4,
     .groups = true,
     .frozen = true,
     .moments = true,
     .precision = "",
     .format = "fp32",
     .fsdp = true,
     .batch = 3},
    {.name = "llmc/one",
     .ranks = 1,
     .updates = 4,
     .groups = true,
     .moments = true,
     .precision = "",
     .format = "fp32",
     .llmc = true},
    {.name = "llmc/parts",
     .stage = 1,
     .ranks = 2,
     .updates = 4,
     .groups = true,
     .moments = true,
     .precision = "",
     .format = "fp32",
     .llmc = true},
    {.name = "llmc/copies",
     .ranks = 2,
     .updates = 4,
     .groups = true,
     .moments = true,
     .precision = "",
     .format = "fp32",
     .llmc = true},
    /* beside a folder with a tensor for each expert's matrix */
    {.name = "full_experts",
     .ranks = 1,
     .updates = 4,
     .moments = true,
     .precision = "",
     .format = "fp32",
     .model = MIXTRAL,
     .tensors = 16,
     .fsdp = true,
     .batch = 3},
    /* the same of layers of two sizes, tied, with what each is multiplied by */
    {.name = "deepspeed/stage2_gemma4",
     .stage = 2,
     .ranks = 2,
     .updates = 4,
     .moments = true,
     .precision = "",
     .format = "fp32",
     .model = GEMMA4,
     .tensors = 45},
};
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
    CHECKPOINTS = sizeof checkpoints / sizeof checkpoints[0]
};

/* What goes on from a checkpoint, on so many ranks; more: members of it, each with a comma behind. */
static void
configure(spw_config *c, const checkpoint *k, uint32_t ranks, const char *more, const char *spillway)
{
    static const char *const llama =
        "{\"model_type\":\"llama\",\"hidden_size\":8,\"intermediate_size\":12,\"num_hidden_layers\":2,"
        "\"num_attention_heads\":2,\"num_key_value_heads\":1,\"vocab_size\":19,\"max_position_embeddings\":16,"
        "\"rms_norm_eps\":1e-5,\"tie_word_embeddings\":false}";
    static const char *const gpt_oss =
        "{\"model_type\":\"gpt_oss\",\"hidden_size\":24,\"intermediate_size\":13,\"num_hidden_layers\":1,\"head_dim\":"
        "6,"
        "\"num_attention_heads\":4,\"num_key_value_heads\":2,\"vocab_size\":41,\"max_position_embeddings\":64,"
        "\"num_local_experts\":3,\"attention_bias\":false,\"num_experts_per_tok\":3,\"layer_types\":[\"full_"
        "attention\"],\"rope_parameters\":{\"rope_theta\":500.0,\"rope_type\":\"default\"}}";
    static const char *const gpt2 =
        "{\"model_type\":\"gpt2\",\"n_embd\":8,\"n_layer\":2,\"n_head\":2,\"vocab_size\":19,\"n_positions\":16}";
    static const char *const warmup = "{\"type\":\"WarmupLR\",\"params\":{\"warmup_min_lr\":0,\"warmup_max_lr\":0.01,"
                                      "\"warmup_num_steps\":6,\"warmup_type\":\"linear\"}}";
    const char *freeze = k->fsdp && k->model == NULL ? ",\"freeze\":[\"model.layers.0.mlp.up_proj.weight\"]"
                         : k->frozen
                             ? ",\"freeze\":[\"model.embed_tokens.weight\",\"model.layers.0.mlp.up_proj.weight\"]"
                             : "";
    char text[3000];
    snprintf(text, sizeof text,
             "{%s%s\"train_batch_size\":%u,\"gradient_clipping\":%s,"
             "\"optimizer\":{\"type\":\"AdamW\",\"params\":{\"lr\":0.01,\"betas\":[0.9,0.95],\"eps\":1e-8,\"weight_"
             "decay\":0.1}},"
             "\"scheduler\":%s,"
             "\"model\":%s,\"data\":{\"path\":\"a\",\"seq_length\":8},"
             "\"spillway\":{%s\"steps\":8,\"ranks\":%u,\"state_format\":\"%s\",\"decay_norm_and_bias\":%s%s}}",
             k->precision, more, k->batch > 0 ? k->batch : k->ranks, k->fsdp ? "0" : "1.0",
             k->fsdp || k->llmc ? "{}" : warmup,
             k->model     ? k->model
             : k->experts ? gpt_oss
             : k->llmc    ? gpt2
                          : llama,
             spillway, ranks, k->format, k->groups ? "false" : "true", freeze);
    need(spw_config_parse(c, text, "c.json", NULL, 0, &err));
}

/* Its folder, as the file "latest" says, or llm.c's model of the last step. */
static const char *
folder_of(const checkpoint *k)
{
    static char found[SPW_PATH_BYTES];
    char path[200];
    snprintf(path, sizeof path, VECTORS "%s", k->name);
    assert_true(spw_foreign_find(path, found, sizeof found));
    assert_string_equal(strrchr(found, '/'), k->fsdp   ? strrchr(path, '/')
                                             : k->llmc ? "/model_00000004.bin"
                                                       : "/global_step4");
    return found;
}

/* Every tensor is bit for bit what DeepSpeed's accessor gave, or rounds to what is stored of a frozen one. */
static void
test_weights(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < CHECKPOINTS; i++) {
        const checkpoint *k = &checkpoints[i];
        spw_foreign *d;
        spw_hf_reader *r;
        const spw_foreign_about *a;
        need(spw_foreign_open(&d, folder_of(k), &err));
        a = spw_foreign_get_about(d);
        assert_true(a->stage == k->stage && a->ranks == k->ranks && a->steps == SAVED && a->updates == k->updates);
        assert_true(a->samples == (k->fsdp || k->llmc ? UINT64_MAX : SAVED * k->ranks));
        assert_string_equal(a->version, k->fsdp || k->llmc ? "" : "0.19.8");
        assert_true((spw_foreign_model(d) != NULL) == k->llmc);
        assert_int_equal(a->moment_count, 2);
        need(spw_foreign_weights(d, &r, &err));
        spw_foreign_close(d); /* the reader goes on */
        assert_int_equal(spw_hf_reader_count(r), k->tensors > 0 ? k->tensors : k->llmc ? 28 : 21);
        for (uint32_t t = 0; t < spw_hf_reader_count(r); t++) {
            const spw_tensor_info *info = spw_hf_reader_tensor(r, t, NULL);
            float want[ELEMS_MAX];
            char got[ELEMS_MAX * 4];
            uint16_t narrow[ELEMS_MAX];
            uint64_t n;
            expected(k->name, info->name, want, &n);
            assert_int_equal(info->bytes, n * spw_dtype_bytes(info->dtype));
            need(spw_hf_read(r, t, 0, got, info->bytes, &err));
            if (info->dtype != SPW_F32)
                spw_convert(narrow, info->dtype, want, SPW_F32, n);
            same_bytes(k->name, info->name, got, info->dtype != SPW_F32 ? (void *)narrow : (void *)want, info->bytes);
        }
        spw_hf_reader_close(r);
    }
}

/* An engine on one rank that goes on from a checkpoint. */
typedef struct subject {
    spw_config c;
    spw_model *model;
    spw_engine *e;
} subject;

static spw_status
begin(subject *s, const char *folder, spw_comm *comm, spw_error *e)
{
    spw_status st = spw_model_from_config(&s->model, &s->c, e);
    if (st == SPW_OK)
        st = spw_engine_create(
            &s->e,
            &(spw_engine_options){
                .config = &s->c, .model = s->model, .comm = comm, .resumes = true, .process_bytes = TINY_PROCESS_BYTES},
            e);
    return st == SPW_OK ? spw_foreign_load(s->e, folder, e) : st;
}

static void
end(subject *s)
{
    spw_engine_destroy(s->e);
    spw_model_destroy(s->model);
    *s = (subject){.e = NULL};
}

/* How it is called in memory there, and which of that tensor's elements are its: an expert's are a slice of it, and the up projection is behind the gate. */
static uint64_t
place_there(const spw_param *p, char name[SPW_TENSOR_NAME_BYTES])
{
    const uint64_t elems = p->rows * p->cols;
    spw_tensor_info whole;
    const char *older;
    char *experts;
    bool down, up;
    spw_st_describe(&whole, p, SPW_F32);
    older = strstr(whole.name, "block_sparse_moe");
    snprintf(name, SPW_TENSOR_NAME_BYTES, "%.*s%s%s", (int)(older != NULL ? older - whole.name : 0), whole.name,
             older != NULL ? "mlp" : "",
             older != NULL                                 ? older + strlen("block_sparse_moe")
             : strcmp(whole.name, "embed_out.weight") == 0 ? "lm_head.weight"
                                                           : whole.name);
    experts = strstr(name, ".experts.");
    if (whole.stack > 0 || p->expert == 0 || experts == NULL)
        return whole.slice * elems;
    down = strstr(experts, "down_proj") != NULL || strstr(experts, ".w2.") != NULL;
    up = strstr(experts, "up_proj") != NULL || strstr(experts, ".w3.") != NULL;
    snprintf(experts, 40, ".experts.%s", down ? "down_proj" : "gate_up_proj");
    return ((p->expert - 1) * (down ? 1 : 2) + up) * elems;
}

/* A part of every parameter that is trained, bit for bit or within a bound; prefix: of the expected names. */
static spw_status
check_part(subject *s, const char *name, const char *part, const char *prefix, const char *suffix, double bound,
           spw_error *e)
{
    for (uint32_t id = 0; id < s->model->param_count; id++) {
        const spw_param *param = &s->model->params[id];
        char tensor[200], name_there[SPW_TENSOR_NAME_BYTES];
        float all[ELEMS_MAX], got[ELEMS_MAX], *want = all;
        uint64_t n, first;
        spw_access a;
        /* keys' biases have gradient 0 but for rounding, and Adam makes whole steps of that */
        if (param->frozen || (bound > 0 && (strstr(param->name, "c_attn.bias") != NULL ||
                                            strstr(param->name, "query_key_value.bias") != NULL)))
            continue;
        first = place_there(param, name_there);
        snprintf(tensor, sizeof tensor, "%s%.100s%s", prefix, name_there, suffix);
        SPW_TRY(find_expected(name, tensor, all, &n, e));
        SPW_TRY(spw_access_find(&a, s->e, param->name, part, e));
        if (first + a.count > n || (param->expert == 0 && param->stack == 0 && a.count != n))
            return SPW_RAISE(e, SPW_EINVAL, "%s: %s has %llu elements", name, tensor, (unsigned long long)a.count);
        want += first;
        n = a.count;
        SPW_TRY(spw_access_get_full(s->e, &a, got, e));
        for (uint64_t i = 0; i < n; i++) {
            if (!(fabs((double)got[i] - (double)want[i]) <= bound))
                return SPW_RAISE(e, SPW_EINVAL, "%s: %s[%llu] is %.9g, not %.9g", name, tensor, (unsigned long long)i,
                                 (double)got[i], (double)want[i]);
        }
    }
    return SPW_OK;
}

static spw_status
check_state(subject *s, const checkpoint *k, spw_error *e)
{
    SPW_TRY(check_part(s, k->name, "master", "", "", 0, e));
    if (k->moments)
        SPW_TRY(check_part(s, k->name, "exp_avg", "", ".exp_avg", 0, e));
    if (k->moments)
        SPW_TRY(check_part(s, k->name, "exp_avg_sq", "", ".exp_avg_sq", 0, e));
    return spw_engine_updates(s->e) == k->updates ? SPW_OK
                                                  : SPW_RAISE(e, SPW_EINVAL, "%s: another number of updates", k->name);
}

/* In host memory and on nvme, in chunks of any size. */
static void
test_state(void **state)
{
    char dir[256], more[400];
    (void)state;
    tiny_dir_make(dir);
    snprintf(more, sizeof more,
             "\"zero_optimization\":{\"stage\":3,\"offload_param\":{\"device\":\"nvme\",\"nvme_path\":\"%s\"},"
             "\"offload_optimizer\":{\"device\":\"nvme\",\"nvme_path\":\"%s\"}},",
             dir, dir);
    for (uint32_t i = 0; i < 2 * CHECKPOINTS; i++) {
        const checkpoint *k = &checkpoints[i / 2];
        subject s = {.e = NULL};
        configure(&s.c, k, 1, i % 2 == 0 ? "" : more, i % 2 == 0 ? "" : "\"chunk_elems\":8192,");
        need(begin(&s, folder_of(k), NULL, &err));
        need(check_state(&s, k, &err));
        end(&s);
    }
    tiny_dir_remove(dir);
}

static spw_status
load_on_rank(void *ctx, spw_comm *comm, uint32_t rank, spw_error *e)
{
    const checkpoint *k = ctx;
    subject s = {.e = NULL};
    char folder[300];
    spw_status st;
    (void)rank;
    snprintf(folder, sizeof folder, VECTORS "%s/global_step4", k->name);
    configure(&s.c, k, 2, "\"zero_optimization\":{\"stage\":3},", "");
    st = begin(&s, folder, comm, e);
    if (st == SPW_OK)
        st = check_state(&s, k, e);
    end(&s);
    return st;
}

/* What three ranks wrote, on two. */
static void
test_ranks(void **state)
{
    checkpoint k = checkpoints[STAGE3];
    (void)state;
    k.ranks = 4; /* a batch that shares out */
    ranks_run(2, &(spw_comm_options){.chaos_seed = 3}, load_on_rank, &k);
}

/* The same as in make_foreign_vectors.py. */
static void
batch(const spw_config *c, uint64_t step, int32_t *tokens, int32_t *targets)
{
    for (uint64_t row = 0; row < c->train_batch_size; row++) {
        for (uint64_t i = 0; i <= LENGTH; i++) {
            int32_t x = (int32_t)((step * 7 + row * 5 + (step + 1) * i * i * 3 + i) % 19);
            if (i < LENGTH)
                tokens[row * LENGTH + i] = x;
            if (i > 0)
                targets[row * LENGTH + i - 1] = x;
        }
    }
}

/* Four more steps here, beside the four that they went on with: losses to a millionth, and the masters that come of them. */
static void
test_goes_on(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < CHECKPOINTS; i++) {
        const checkpoint *k = &checkpoints[i];
        bool exact = strcmp(k->format, "fp32") == 0;
        subject s = {.e = NULL};
        float losses[ELEMS_MAX];
        uint64_t n;
        if (k->experts)
            continue; /* its tokens are others */
        expected(k->name, "losses", losses, &n);
        assert_int_equal(n, STEPS);
        configure(&s.c, k, 1, "", "");
        need(begin(&s, folder_of(k), NULL, &err));
        for (uint64_t step = SAVED; step < STEPS; step++) {
            int32_t tokens[4 * LENGTH], targets[4 * LENGTH];
            spw_step_result result;
            double off, lr = spw_schedule_lr(&s.c, spw_engine_updates(s.e) + 1);
            batch(&s.c, step, tokens, targets);
            need(spw_engine_step(s.e, tokens, targets, (uint32_t)s.c.accumulation, lr, &result, &err));
            off = fabs(result.loss / (double)losses[step] - 1);
            if (off > (exact ? 1e-6 : 1e-2)) /* bf16 and fp16 are computed with in fp32 here */
                fail_msg("%s: loss %.9g of step %llu, theirs is %.9g", k->name, result.loss, (unsigned long long)step,
                         (double)losses[step]);
        }
        if (exact)
            need(check_part(&s, k->name, "master", "end.", "",
                            k->model != NULL && strstr(k->model, "gemma4") != NULL ? 5e-6 : 3e-6, &err));
        end(&s);
    }
}

static void
test_loss_scale(void **state)
{
    const checkpoint *k = &checkpoints[FP16];
    subject s = {.e = NULL};
    float want[ELEMS_MAX];
    uint64_t n;
    const spw_loss_scaler *scaler;
    (void)state;
    expected(k->name, "scaler", want, &n);
    configure(&s.c, k, 1, "", "");
    need(begin(&s, folder_of(k), NULL, &err));
    scaler = spw_engine_loss_scaler(s.e);
    assert_true(scaler->dynamic && scaler->scale == (double)want[0] && scaler->scale < 524288);
    assert_int_equal(s.e->step_count, SAVED); /* one of them an update: masks go on with the fifth */
    assert_true((float)scaler->hysteresis == want[1] && (float)scaler->steps == want[2] &&
                (float)scaler->last_overflow == want[3]);
    end(&s);
}

/* ---------------------------------------------------------------- another configuration than it was */

static char lines[4000];

static void
note(void *ctx, const char *text)
{
    size_t n = strlen(lines);
    (void)ctx;
    snprintf(lines + n, sizeof lines - n, "%s\n", text);
}

static void
compares_in(const char *folder, const spw_config *c, uint32_t count, const char *says)
{
    uint32_t found;
    lines[0] = '\0';
    need(spw_foreign_compare(folder, c, note, NULL, &found, &err));
    if (found != count || strstr(lines, says) == NULL)
        fail_msg("%s: %u differences, not %u, and \"%s\" should be among\n%s", folder, found, count, says, lines);
}

static void
compares(const checkpoint *k, const spw_config *c, uint32_t count, const char *says)
{
    compares_in(folder_of(k), c, count, says);
}

static void
test_compare(void **state)
{
    const checkpoint *k = &checkpoints[STAGE2];
    spw_config c;
    (void)state;
    for (uint32_t i = 0; i < CHECKPOINTS; i++) {
        configure(&c, &checkpoints[i], 1, "", "");
        compares(&checkpoints[i], &c, 0, "");
    }
    configure(&c, k, 1, "", "");
    c.optimizer.beta2 = 0.999;
    c.gradient_clipping = 0;
    compares(k, &c, 2, "optimizer.params.betas: [0.9,0.95] in the checkpoint, [0.9,0.999] now\n");
    configure(&c, k, 1, "", "");
    c.train_batch_size = 6;
    c.accumulation = 2;
    compares(k, &c, 3, "train_batch_size: 3 in the checkpoint, 6 now\n");
    configure(&c, k, 1, "", "");
    c.run.decay_norm_and_bias = true;
    compares(
        k, &c, 1,
        "weight decay of model.layers.0.input_layernorm.weight (spillway.decay_norm_and_bias): 0 in the checkpoint, "
        "0.1 now\n");
    configure(&c, &checkpoints[STAGE3], 1, "", ""); /* stage 3, whose groups have several arrays */
    c.run.decay_norm_and_bias = true;
    compares(&checkpoints[STAGE3], &c, 1, "0 in the checkpoint, 0.1 now\n");
    configure(&c, k, 1, "", "\"freeze\":[\"lm_head.weight\"],");
    compares(k, &c, 1, "spillway.freeze: lm_head.weight was trained in the checkpoint, is frozen now\n");
    configure(&c, &checkpoints[FSDP], 1, "", ""); /* which has no configuration: what its optimizer had is compared */
    c.run.decay_norm_and_bias = true;
    c.optimizer.beta1 = 0.8;
    c.gradient_clipping = 0.5;
    compares(&checkpoints[FSDP], &c, 2, "optimizer.params.betas: [0.9,0.95] in the checkpoint, [0.8,0.95] now\n");
    configure(&c, &checkpoints[FSDP], 1, "", "");
    snprintf(c.optimizer.type, sizeof c.optimizer.type, "Lion");
    compares(&checkpoints[FSDP], &c, 1,
             "optimizer: it kept exp_avg, exp_avg_sq of each element in the checkpoint, Lion keeps 1 of them now\n");
    configure(&c, &checkpoints[TRAINER], 1, "", ""); /* its numbers are each parameter's */
    c.run.decay_norm_and_bias = true;
    compares(&checkpoints[TRAINER], &c, 1, "0 in the checkpoint, 0.1 now\n");
    configure(&c, &checkpoints[LLMC], 1, "", ""); /* where these three cannot be chosen, and shapes do not tell heads */
    c.run.decay_norm_and_bias = true;
    c.optimizer.beta2 = 0.999;
    c.gradient_clipping = 0.5;
    c.model.heads = c.model.kv_heads = 1;
    c.model.head_dim = 8;
    compares(&checkpoints[LLMC], &c, 4, "model: 2 heads in the checkpoint, 1 now\n");
    configure(&c, &checkpoints[FULL], 1, "", ""); /* its groups name their parameters */
    c.run.decay_norm_and_bias = true;
    c.optimizer.eps = 1e-6;
    compares(&checkpoints[FULL], &c, 2, "0 in the checkpoint, 0.1 now\n");
    configure(&c, &checkpoints[FROZEN], 1, "", "");
    c.run.freeze.count = 1;
    compares(&checkpoints[FROZEN], &c, 1, "was frozen in the checkpoint, is trained now\n");
    configure(&c, k, 1, "", "\"lora\":{\"rank\":2,\"targets\":[\"q_proj\"]},");
    {
        uint32_t found;
        assert_int_equal(spw_foreign_compare(folder_of(k), &c, note, NULL, &found, &err), SPW_EUNSUPPORTED);
    }
}

/* ---------------------------------------------------------------- what is damaged, missing or of another model */

/* A copy of a checkpoint's folder, to be spoiled. */
static void
copy_checkpoint(const checkpoint *k, const char *to)
{
    char command[700];
    snprintf(command, sizeof command, "rm -rf %s/* %s/.metadata && cp -r %s/. %s/", to, to, folder_of(k), to);
    assert_int_equal(system(command), 0);
}

static void
opens_not(const char *folder, spw_status st, const char *says)
{
    spw_foreign *d;
    err = (spw_error){0};
    if (spw_foreign_open(&d, folder, &err) != st || strstr(err.message, says) == NULL)
        fail_msg("\"%s\" should hold \"%s\"", err.message, says);
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
    configure(&c, &checkpoints[FULL], 1, "", "");
    err = (spw_error){0};
    need(spw_model_from_config(&m, &c, &err));
    need(spw_foreign_open(&d, folder, &err));
    need(spw_foreign_weights(d, &weights, &err));
    assert_true(spw_hf_reader_count(weights) > 0);
    if (spw_foreign_check_state(d, &err) != st || strstr(err.message, says) == NULL)
        fail_msg("\"%s\" should hold \"%s\"", err.message, says);
    err = (spw_error){0};
    assert_int_equal(spw_foreign_moments(d, weights, m, NULL, 0, &moments, &err), st);
    assert_non_null(strstr(err.message, says));
    assert_null(moments);
    spw_hf_reader_close(weights);
    spw_foreign_close(d);
    spw_model_destroy(m);
    assert_int_equal(spw_foreign_read_state(folder, &c, &state, NULL), st);
}

static void
loads_not(const spw_config *c, const char *folder, spw_status st, const char *says)
{
    subject s = {.c = *c};
    err = (spw_error){0};
    if (begin(&s, folder, NULL, &err) != st || strstr(err.message, says) == NULL)
        fail_msg("%s: \"%s\" should hold \"%s\"", folder, err.message, says);
    end(&s);
}

/* All that is opened and found, without memory for one allocation or with one read that fails: refused, and nothing stays behind. */
static spw_status
look_at_all(const spw_model *m, const char *folder)
{
    static const char *const moments[] = {"exp_avg", "exp_avg_sq"};
    spw_foreign *d = NULL;
    spw_hf_reader *weights = NULL;
    spw_st_reader *r = NULL;
    spw_status st = spw_foreign_open(&d, folder, &err);
    if (st == SPW_OK)
        st = spw_foreign_weights(d, &weights, &err);
    if (st == SPW_OK)
        st = spw_hf_reader_bind(weights, m, &err);
    if (st == SPW_OK)
        st = spw_foreign_moments(d, weights, m, moments, 2, &r, &err);
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
        const checkpoint *k = &checkpoints[kinds[run / 2]];
        const char *folder = folder_of(k);
        bool calls = run % 2 == 1;
        unsigned n = SANITIZED ? 1 + (unsigned)run / 2 % 3 : 1; /* with them every third, of each folder others */
        bool fired = true;
        spw_config c;
        spw_model *m;
        configure(&c, k, 1, "", "");
        need(spw_model_from_config(&m, &c, &err));
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
    copy_checkpoint(&checkpoints[STAGE2], dir);
    snprintf(path, sizeof path, "%s/zero_pp_rank_0_mp_rank_00_optim_states.pt", dir);
    patch(path, "X\n\0\0\0ds_version", "U\tds_configN0N0", 15, false); /* the last one of that name counts: "0.19.8" */
    need(spw_foreign_open(&d, dir, &err));
    assert_null(spw_foreign_config(d));
    assert_string_equal(spw_foreign_get_about(d)->config_name, "0.19.8");
    spw_foreign_close(d);
    configure(&c, &checkpoints[STAGE2], 1, "", "");
    c.train_batch_size = 6; /* which nobody knows */
    c.accumulation = 2;
    c.optimizer.beta2 = 0.999;
    c.gradient_clipping = 0;
    compares_in(dir, &c, 2, "optimizer.params.betas: [0.9,0.95] in the checkpoint, [0.9,0.999] now\n");
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
    copy_checkpoint(&checkpoints[TRAINER], dir);
    snprintf(path, sizeof path, "%s/optimizer_0/__1_0.distcp", dir);
    text = tiny_load(path, &bytes);
    with = memmem(text, bytes, "\x80\2G\x3f", 4);
    without = memmem(text, bytes, "\x80\2G\0", 4);
    assert_true(with != NULL && without != NULL);
    memcpy(without - (with - text), text, ENTRY_BYTES);
    tiny_store(path, text, bytes);
    free(text);
    configure(&c, &checkpoints[TRAINER], 1, "", "");
    compares_in(dir, &c, 1,
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
    copy_checkpoint(&checkpoints[STAGE3], dir);
    patch(second, "K\xb5\x85", "K\xb4\x85", 3, false);
    opens_not(dir, SPW_ECORRUPT,
              "rank_1_mp_rank_00_optim_states.pt: the optimizer's state is shorter than its masters");
    copy_checkpoint(&checkpoints[STAGE3], dir);
    patch(second, "K\xb5\x85", "K\xb4\x85", 3, true);
    opens_not(dir, SPW_ECORRUPT, "rank_1_mp_rank_00_optim_states.pt: its masters are not as many as the first rank's");
    for (int r = 0; r < 3; r++) { /* all of them */
        copy_checkpoint(&checkpoints[STAGE3], dir);
        for (int k = 0; k < 3; k++) {
            char path[400];
            snprintf(path, sizeof path, "%s/zero_pp_rank_%d_mp_rank_00_optim_states.pt", dir, k);
            patch(path, "K\x0f\x85", r == 0 ? "K\x0e\x85" : "K\x0d\x85", 3, true); /* the last sub-group's 15 */
        }
        opens_not(dir, SPW_ECORRUPT, "elements of a flat array, and its files have");
    }
    copy_checkpoint(&checkpoints[STAGE3], dir);
    patch(first, "K\xb5\x85", "K\xb6\x85", 3, true);
    opens_not(dir, SPW_ECORRUPT, "lies outside of its storage");
    copy_checkpoint(&checkpoints[STAGE3], dir); /* arrays with more than parameters, whose first one is (18, 8) now */
    snprintf(second, sizeof second, "%s/zero_pp_rank_0_mp_rank_00_model_states.pt", dir);
    patch(second, "K\x13K\x08\x86", "K\x12K\x08\x86", 5, false);
    opens_not(dir, SPW_ECORRUPT, "parameters take 438 elements of a flat array, and its files have 441");
    copy_checkpoint(&checkpoints[STAGE3], dir); /* a stage that the model's states are not of */
    patch(first, "K\x03\x85", "K\x02\x85", 3, false);
    opens_not(dir, SPW_ECORRUPT, "zero_stage is not 1, 2 or 3, or not that of the model's states");
    copy_checkpoint(&checkpoints[STAGE2], dir); /* the optimizer's own count of updates is what its moments know */
    {
        uint64_t bytes;
        char *text = tiny_load(first, &bytes), *four = memmem(text, bytes, "\0\0\x80\x40", 4);
        assert_non_null(four);
        memcpy(four, "\0\0\x40\x40", 4);
        tiny_store(first, text, bytes);
        free(text);
    }
    need(spw_foreign_open(&d, dir, &err));
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
    copy_checkpoint(&checkpoints[FSDP], dir);
    assert_int_equal(unlink(path), 0);
    opens_not(dir, SPW_ENOENT, "__1_0.distcp: No such file");
    copy_checkpoint(&checkpoints[FSDP], dir);
    text = tiny_load(path, &bytes);
    for (uint64_t n = 0; n < bytes; n += 9973) {
        tiny_store(path, text, n);
        opens_not(dir, SPW_ECORRUPT, "__1_0.distcp");
    }
    free(text);
    copy_checkpoint(&checkpoints[FSDP], dir);
    text = tiny_load(metadata, &bytes);
    for (uint64_t n = 0; n < bytes; n += 997) {
        tiny_store(metadata, text, n);
        opens_not(dir, SPW_ECORRUPT, ".metadata: damaged pickle");
    }
    free(text);
    copy_checkpoint(&checkpoints[FSDP], dir); /* the embeddings' size: 19 rows of 8, in chunks of 7, 7 and 5 */
    replace(metadata, "K\x13K\x08\x86", "K\x14K\x08\x86", 5, false);
    opens_not(dir, SPW_ECORRUPT, "its chunks are not all of its rows");
    copy_checkpoint(&checkpoints[FSDP], dir);
    replace(metadata, "K\x13K\x08\x86", "K\x13K\x09\x86", 5, false);
    opens_not(dir, SPW_EUNSUPPORTED, "is not cut by rows alone");
    copy_checkpoint(&checkpoints[FSDP], dir);
    replace(metadata, "K\x07K\x00\x86", "K\x06K\x00\x86", 5, false); /* a chunk that begins a row early */
    opens_not(dir, SPW_ECORRUPT, "its chunks leave rows out, or have some twice");
    copy_checkpoint(&checkpoints[FSDP], dir);
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
    copy_checkpoint(&checkpoints[FSDP], dir);
    replace(metadata, "K\x07K\x08\x86", "K\x06K\x08\x86", 5, false);
    opens_not(dir, SPW_ECORRUPT, "a chunk has another shape than .metadata says");
    copy_checkpoint(&checkpoints[FSDP], dir);
    replace(metadata, "\x8c\x03\x66qn", "\x8c\x03gqn", 5, false); /* a member of what says which tensor lies where */
    opens_not(dir, SPW_ECORRUPT, "a place without a name");
    copy_checkpoint(&checkpoints[FSDP], dir); /* one parameter's moment by another name */
    replace(metadata, "layers.0.self_attn.k_proj.weight.exp_avg_sq\x94",
            "layers.0.self_attn.k_proj.weight.exp_avg_sr\x94", 44, true);
    opens_not(dir, SPW_ECORRUPT, "the optimizer has not all of what it has of others");
    copy_checkpoint(&checkpoints[FSDP], dir); /* moments of (4, 8) and (8, 8) change places */
    replace(metadata, "layers.0.self_attn.k_proj.weight.exp_avg\x94", "layers.0.self_attn.x_proj.weight.exp_avg\x94",
            41, true);
    replace(metadata, "layers.0.self_attn.q_proj.weight.exp_avg\x94", "layers.0.self_attn.k_proj.weight.exp_avg\x94",
            41, true);
    replace(metadata, "layers.0.self_attn.x_proj.weight.exp_avg\x94", "layers.0.self_attn.q_proj.weight.exp_avg\x94",
            41, true);
    opens_not(dir, SPW_ECORRUPT, "it has another shape than the parameter's other moments");
    copy_checkpoint(&checkpoints[FSDP], dir); /* weights do */
    replace(metadata, "model.model.layers.0.self_attn.k_proj.weight\x94",
            "model.model.layers.0.self_attn.x_proj.weight\x94", 45, true);
    replace(metadata, "model.model.layers.0.self_attn.q_proj.weight\x94",
            "model.model.layers.0.self_attn.k_proj.weight\x94", 45, true);
    replace(metadata, "model.model.layers.0.self_attn.x_proj.weight\x94",
            "model.model.layers.0.self_attn.q_proj.weight\x94", 45, true);
    opens_not(dir, SPW_ECORRUPT, "it has another shape than its moments");
    copy_checkpoint(&checkpoints[FSDP], dir);
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
    need(spw_foreign_open(&w, VECTORS "fsdp/trainer", &err));
    need(spw_foreign_weights(w, &whole, &err));
    for (int tied = 0; tied < 2;
         tied++) { /* tied: no head that "model.norm.weight" would have only "model." in common with */
        copy_checkpoint(&checkpoints[TRAINER], dir);
        snprintf(path, sizeof path, "%s/optimizer_0/.metadata", dir);
        assert_int_equal(unlink(path), 0);
        snprintf(path, sizeof path, "%s/pytorch_model_fsdp_0/.metadata", dir);
        if (tied)
            replace(path, "model.lm_head.weight", "model.model.heads.ht", 20, true);
        resumes_not(dir, SPW_ENOENT, "it holds no optimizer's state");
        need(spw_foreign_open(&d, dir, &err));
        need(spw_foreign_weights(d, &alone, &err));
        assert_int_equal(spw_hf_reader_count(alone), spw_hf_reader_count(whole));
        for (uint32_t i = tied ? 2 : 0; i < spw_hf_reader_count(whole);
             i++) { /* head and embeddings are the first by name */
            t = spw_hf_reader_tensor(whole, i, NULL);
            assert_string_equal(spw_hf_reader_tensor(alone, i, NULL)->name, t->name);
            need(spw_hf_read(whole, i, 0, x, t->bytes, &err));
            need(spw_hf_read(alone, i, 0, y, t->bytes, &err));
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
        copy_checkpoint(&checkpoints[FULL], dir);
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
    copy_checkpoint(&checkpoints[FULL], dir);
    patch(path, "model.norm.weight", "model.norm.weighs", 17, true);
    resumes_not(dir, SPW_ECORRUPT, "model.norm.weighs: there are no weights of this name");
    copy_checkpoint(&checkpoints[FULL], dir);
    patch(path, "K\x13K\x08\x86", "K\x12K\x08\x86", 5, false);
    resumes_not(dir, SPW_ECORRUPT, "model.embed_tokens.weight: it has another shape than its weights");
    copy_checkpoint(&checkpoints[FULL], dir);
    text = tiny_load(path, &bytes);
    for (uint64_t n = 0; n < bytes; n += 997) {
        tiny_store(path, text, n);
        assert_true(spw_foreign_find(dir, found, sizeof found));
        need(spw_foreign_open(&d, dir, &err));
        assert_int_not_equal(spw_foreign_check_state(d, &err), SPW_OK);
        assert_non_null(strstr(err.message, path));
        err = (spw_error){0};
        spw_foreign_close(d);
    }
    free(text);
    tiny_dir_remove(dir);
}

/* Experts' matrices that are (in, out) in the weights are so in what the optimizer has of them: here twice the weights, and their half. */
static void
test_turned(void **state)
{
    static const char *const names[] = {"exp_avg", "exp_avg_sq"};
    spw_hf_reader *weights;
    spw_st_reader *moments;
    spw_model_config config;
    spw_model *m;
    spw_foreign *d;
    char dir[256], command[900];
    uint32_t found = 0;
    (void)state;
    tiny_dir_make(dir);
    snprintf(command, sizeof command, "cp " VECTORS "families/qwen3_vl_moe_images/* " VECTORS "fsdp/turned/* %s", dir);
    assert_int_equal(system(command), 0);
    need(spw_foreign_open(&d, dir, &err));
    need(spw_hf_config_load(&config, dir, &err));
    need(spw_model_build(&m, &config, &err));
    need(spw_foreign_weights(d, &weights, &err));
    need(spw_hf_reader_bind(weights, m, &err));
    need(spw_foreign_moments(d, weights, m, names, 2, &moments, &err));
    for (uint32_t id = 0; id < m->param_count; id++) {
        const uint64_t n = m->params[id].rows * m->params[id].cols;
        for (uint32_t k = 0; k < 2; k++) {
            char name[200];
            float w[ELEMS_MAX], got[ELEMS_MAX];
            const spw_tensor_info *t;
            snprintf(name, sizeof name, "%s.%s", m->params[id].name, names[k]);
            t = spw_st_reader_find(moments, name);
            if (t == NULL)
                continue;
            found++;
            assert_int_equal(t->bytes, n * sizeof *got);
            need(spw_hf_read_param(weights, id, 0, n, w, &err));
            need(spw_st_read(moments, t, 0, got, t->bytes, &err));
            for (uint64_t i = 0; i < n; i++) {
                if (got[i] != (k == 0 ? 2 * w[i] : w[i] / 2))
                    fail_msg("%s[%llu] is %.9g", name, (unsigned long long)i, (double)got[i]);
            }
        }
    }
    assert_int_equal(found, 2 * 3 * config.experts);
    spw_st_reader_close(moments);
    spw_hf_reader_close(weights);
    spw_model_destroy(m);
    spw_foreign_close(d);
    tiny_dir_remove(dir);
}

/* Averages of the weights (0) lie beside the weights (1), by names that come first: they are not taken for what is trained. */
static void
test_averages(void **state)
{
    spw_hf_reader *weights;
    spw_foreign *d;
    float w[4];
    (void)state;
    need(spw_foreign_open(&d, VECTORS "fsdp/averages", &err));
    need(spw_foreign_weights(d, &weights, &err));
    assert_int_equal(spw_hf_reader_count(weights), 1);
    need(spw_hf_read(weights, 0, 0, w, sizeof w, &err));
    for (int i = 0; i < 4; i++)
        assert_true(w[i] == 1);
    spw_hf_reader_close(weights);
    spw_foreign_close(d);
}

/* Without the optimizer's "step", of which torch.optim.SGD has none: a schedule and data would begin again. */
static void
test_uncounted(void **state)
{
    char dir[256], path[400], *text;
    uint64_t bytes;
    (void)state;
    tiny_dir_make(dir);
    copy_checkpoint(&checkpoints[FSDP], dir);
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

/* Parameters count their updates each for itself: the most is what a schedule goes by, and that others have made fewer is told. */
static void
test_uneven(void **state)
{
    char dir[256], command[900];
    spw_config c;
    spw_foreign *d;
    (void)state;
    tiny_dir_make(dir);
    copy_checkpoint(&checkpoints[FULL], dir);
    snprintf(command, sizeof command, "cp " VECTORS "fsdp/broken/uneven.bin %s/optimizer.bin", dir);
    assert_int_equal(system(command), 0);
    need(spw_foreign_open(&d, dir, &err));
    assert_int_equal(spw_foreign_get_about(d)->updates, 4);
    spw_foreign_close(d);
    configure(&c, &checkpoints[FULL], 1, "", "");
    compares_in(dir, &c, 1, "updates: some parameters have made fewer than 4 in the checkpoint");
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
    copy_checkpoint(&checkpoints[STAGE2], dir);
    assert_true(spw_foreign_find(dir, found, sizeof found));
    snprintf(path, sizeof path, "%s" RANK_1, dir);
    snprintf(other, sizeof other, "%s/zero_pp_rank_2_mp_rank_00_optim_states.pt", dir);
    assert_int_equal(unlink(path), 0);
    opens_not(dir, SPW_ENOENT, "zero_pp_rank_1_mp_rank_00_optim_states.pt");
    assert_int_equal(unlink(other), 0);
    opens_not(dir, SPW_ECORRUPT, "was written by 3 ranks, and there are files of 1");
    copy_checkpoint(&checkpoints[STAGE2], dir);
    snprintf(other, sizeof other, "%s/zero_pp_rank_0_mp_rank_01_optim_states.pt", dir);
    tiny_store(other, "x", 1);
    opens_not(dir, SPW_EUNSUPPORTED, "cut into 2 parts");
    copy_checkpoint(&checkpoints[STAGE2], dir);
    snprintf(other, sizeof other, "%s/mp_rank_00_model_states.pt", dir);
    assert_int_equal(unlink(other), 0);
    opens_not(dir, SPW_ENOENT, "model_states.pt");
    copy_checkpoint(&checkpoints[STAGE2], dir); /* a rank's file of stage 3 among those of stage 2 */
    snprintf(other, sizeof other, "%s" RANK_1, folder_of(&checkpoints[STAGE3]));
    text = tiny_load(other, &bytes);
    tiny_store(path, text, bytes);
    free(text);
    opens_not(dir, SPW_ECORRUPT, "masters of the optimizer's groups are missing");
    copy_checkpoint(&checkpoints[STAGE3], dir); /* of two groups among four */
    snprintf(other, sizeof other, "%s" RANK_1, folder_of(&checkpoints[STAGE2]));
    text = tiny_load(other, &bytes);
    tiny_store(path, text, bytes);
    opens_not(dir, SPW_ECORRUPT, "masters of the optimizer's groups are missing");
    tiny_store(path, text, bytes / 2);
    opens_not(dir, SPW_ECORRUPT, "zero_pp_rank_1_mp_rank_00_optim_states.pt: it ends before");
    free(text);
    copy_checkpoint(&checkpoints[NVME], dir);
    snprintf(other, sizeof other, "%s/offloaded_tensors/rank01/exp_avg-0_1.tensor.swp", dir);
    assert_int_equal(truncate(other, 640), 0);
    opens_not(dir, SPW_ECORRUPT, "exp_avg-0_1.tensor.swp has 640 bytes, and its parameters take 648");
    assert_int_equal(unlink(other), 0);
    opens_not(dir, SPW_ENOENT, "rank01/exp_avg-0_1.tensor.swp");
    configure(&c, &checkpoints[STAGE2], 1, "", "");
    snprintf(c.optimizer.type, sizeof c.optimizer.type, "SGD");
    c.optimizer.momentum = 0.9;
    loads_not(&c, folder_of(&checkpoints[STAGE2]), SPW_ECONFIG,
              "has no momentum_buffer, which this configuration's needs; it keeps: exp_avg, exp_avg_sq");
    configure(&c, &checkpoints[FROZEN], 1, "", "");
    c.run.freeze.count = 1;
    loads_not(&c, folder_of(&checkpoints[FROZEN]), SPW_EUNSUPPORTED, "layers.0.mlp.up_proj.weight was frozen there");
    configure(&c, &checkpoints[STAGE2], 1, "", "");
    c.model.layers = 3;
    loads_not(&c, folder_of(&checkpoints[STAGE2]), SPW_ECORRUPT, "tensor model.layers.2");
    tiny_dir_remove(dir);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_weights),      cmocka_unit_test(test_state),        cmocka_unit_test(test_ranks),
        cmocka_unit_test(test_goes_on),      cmocka_unit_test(test_loss_scale),   cmocka_unit_test(test_compare),
        cmocka_unit_test(test_faults),       cmocka_unit_test(test_refused),      cmocka_unit_test(test_sizes),
        cmocka_unit_test(test_config_named), cmocka_unit_test(test_uncounted),    cmocka_unit_test(test_uneven_decay),
        cmocka_unit_test(test_fsdp_refused), cmocka_unit_test(test_fsdp_weights), cmocka_unit_test(test_full_refused),
        cmocka_unit_test(test_uneven),       cmocka_unit_test(test_turned),       cmocka_unit_test(test_averages),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
