/*
 * spw_files.h - safetensors files, read and written by ranges, and Hugging Face folders (formats: README of huggingface/safetensors; transformers).
 *
 *   u64 N | N bytes of JSON header, padded with spaces | tensor bytes, no holes
 */
#ifndef SPW_FILES_H
#define SPW_FILES_H

#include "spw_nn.h"
#include <stdio.h>

#ifdef __cplusplus
extern "C" {
#endif

/*
 * spw_crc64_part - what a stretch of bytes with so many behind it adds to the CRC-64/XZ of all (polynomial of ECMA-182, as in xz files).
 * Stretches come in any order from any thread; those that do not overlap are put together by XOR.
 * spw_crc64_whole - the CRC of so many bytes from the XOR of its parts.
 */
uint64_t spw_crc64_part(const void *data, uint64_t bytes, uint64_t behind);
uint64_t spw_crc64_whole(uint64_t parts, uint64_t bytes);

/*
 * Buffers of SPW_BOUNCE_BYTES that runs of large files pass through on their way past the page cache. Any threads may share them: as many
 * transfers are under way as there are buffers, and who finds none waits. Who makes bytes of one run out of another's has one while it
 * waits for the next, so there must be more than threads that do. spw_bounce_bytes: the memory of so many. spw_bounce_spill, before the
 * first run: where the disk takes fewer than rate bytes a second, so many may wait for it in the page cache instead of whoever writes.
 */
typedef struct spw_bounce spw_bounce;
enum { SPW_BOUNCE_BYTES = 1 << 20 };
spw_status spw_bounce_create(spw_bounce **out, uint32_t count, spw_error *err);
void spw_bounce_destroy(spw_bounce *b); /* NULL is fine */
uint64_t spw_bounce_bytes(uint32_t count);
void spw_bounce_spill(spw_bounce *b, uint64_t bytes, uint64_t rate);

/* The CRC-64/XZ of a file, by up to four threads. spw_file_digest_bytes: their memory, beside the buffers. */
spw_status spw_file_digest(const char *path, spw_bounce *bounce, uint64_t *digest, spw_error *err);
uint64_t spw_file_digest_bytes(void);

enum { SPW_TENSOR_NAME_BYTES = 160, SPW_TENSOR_DIMS_MAX = 5 }; /* 5: what reads images in Qwen2-VL */

typedef struct spw_tensor_info {
    char name[SPW_TENSOR_NAME_BYTES];
    spw_dtype dtype;  /* SPW_DTYPE_COUNT, of the reader: one that the format has and nothing here computes with */
    const char *type; /* "BF16", "BOOL": as the file says; set by the reader */
    uint32_t ndim;
    uint64_t shape[SPW_TENSOR_DIMS_MAX];
    uint64_t begin, bytes; /* in the data buffer; set by the writer and the reader */
    bool whole;            /* for the writer: 64-bit integers, whatever dtype says */
    uint32_t stack,
        slice; /* for the writer: one of so many tensors of one name, shape and type that make one (stack, ...); 0: whole */
} spw_tensor_info;

/* Of some of a file's bytes: parts of its CRC-64, and how many they are. */
typedef struct spw_st_sum {
    uint64_t parts, bytes;
} spw_st_sum;

/*
 * A writer knows all tensors beforehand, writes any range in any order from any thread, and commits with fsync, rename
 * and fsync of the folder. Until then the target does not exist (or is the old one); destroy removes an uncommitted file.
 */
typedef struct spw_st_writer spw_st_writer;
spw_status spw_st_writer_create(spw_st_writer **out, const char *path, const spw_tensor_info *tensors,
                                uint32_t tensor_count, spw_error *err);
/*
 * A second writer, of another process, for the file that one is creating: temporary is that one's, the tensors are the same.
 * Its commit makes durable what it wrote and leaves the rest to the first; destroy removes nothing.
 */
spw_status spw_st_writer_join(spw_st_writer **out, const char *temporary, const spw_tensor_info *tensors,
                              uint32_t tensor_count, spw_error *err);
const char *spw_st_writer_temporary(const spw_st_writer *w);
/* bytes at offset of tensor i, i as given to create. Errors: SPW_ENOSPC, SPW_EIO naming the file. */
spw_status
spw_st_write(spw_st_writer *w, uint32_t i, uint64_t offset, const void *data, uint64_t bytes, spw_error *err);
/*
 * spw_st_writer_past_cache - lends buffers for the runs of this writer, until it is destroyed. Other writers may have them too.
 * spw_st_write_run - bytes at offset of tensor i, which make writes to memory: at most SPW_BOUNCE_BYTES at a time, in order, elements whole.
 *          They go past the page cache, parts of pages at the run's ends when the rest of theirs has come, or with the commit.
 *          Errors: those of make, and of spw_st_write.
 */
typedef spw_status (*spw_st_make_fn)(void *ctx, uint64_t offset, void *out, uint64_t bytes, spw_error *err);
void spw_st_writer_past_cache(spw_st_writer *w, spw_bounce *bounce);
spw_status spw_st_write_run(spw_st_writer *w, uint32_t i, uint64_t offset, uint64_t bytes, spw_st_make_fn make,
                            void *ctx, spw_error *err);
spw_status spw_st_writer_commit(spw_st_writer *w, spw_error *err);
void spw_st_writer_destroy(spw_st_writer *w); /* NULL is fine */
/*
 * spw_st_writer_sum - what this writer has written so far, summed on the way to the file. Where the bytes of all its writers together
 * are the file's, and nothing was written twice, spw_crc64_whole() has the file's digest. No write may be under way.
 */
spw_st_sum spw_st_writer_sum(const spw_st_writer *w);
uint64_t spw_st_writer_file_bytes(const spw_st_writer *w);

/*
 * A reader checks every rule of the format; errors are SPW_ECORRUPT and name file and field. Tensors of types that nothing here
 * computes with are described like others: old files hold masks of them beside their weights.
 * Of a file of torch.save (PyTorch 1.6 and later) it reads the tensors that a dict has by their names; its pickle is read, not run.
 * SPW_EUNSUPPORTED: there are none, or one is a transposed view.
 * Of llm.c's weights (model_00000040.bin) it has the tensors of Hugging Face's GPT-2, whose linear weights are the transpose of what is stored.
 */
typedef struct spw_st_reader spw_st_reader;
spw_status spw_st_reader_open(spw_st_reader **out, const char *path, spw_error *err);
void spw_st_reader_close(spw_st_reader *r); /* NULL is fine */
uint32_t spw_st_reader_count(const spw_st_reader *r);
const spw_tensor_info *spw_st_reader_tensor(const spw_st_reader *r, uint32_t i);
const spw_tensor_info *spw_st_reader_find(const spw_st_reader *r, const char *name); /* NULL: not there */
spw_status
spw_st_read(spw_st_reader *r, const spw_tensor_info *t, uint64_t offset, void *data, uint64_t bytes, spw_error *err);
/*
 * spw_st_reader_past_cache - lends buffers for the runs of this reader, until it is closed. Other readers may have them too.
 * spw_st_read_run - the same bytes, handed to take in order and aligned for their type, SPW_BOUNCE_BYTES at a time and at the end what is left. They come past the page
 *          cache but for what it has, and are summed: from any thread, each byte once. Errors: those of take too.
 * spw_st_reader_sum - of what was read so, with the header if asked for.
 */
typedef spw_status (*spw_st_take_fn)(void *ctx, uint64_t offset, const void *data, uint64_t bytes, spw_error *err);
void spw_st_reader_past_cache(spw_st_reader *r, spw_bounce *bounce);
spw_status spw_st_read_run(spw_st_reader *r, const spw_tensor_info *t, uint64_t offset, uint64_t bytes,
                           spw_st_take_fn take, void *ctx, spw_error *err);
spw_st_sum spw_st_reader_sum(const spw_st_reader *r, bool header);
uint64_t spw_st_reader_file_bytes(const spw_st_reader *r);

/* Where a tensor's bytes lie: the file as it was when it was opened, and the offset in it. path is the reader's. */
typedef struct spw_st_extent {
    const char *path;
    uint64_t file_bytes, offset;
    int64_t mtime_ns;
} spw_st_extent;
/* false: it lies in several pieces. */
bool spw_st_reader_extent(const spw_st_reader *r, const spw_tensor_info *t, spw_st_extent *out);

/* The tensor, or the slice of one, that a model's files have of a parameter; of one in terms it is fp32, whatever dtype says. */
void spw_st_describe(spw_tensor_info *out, const spw_param *p, spw_dtype dtype);
/*
 * spw_st_round - count elements of the parameter called name, from element first on, as a file has them in dtype.
 * Errors  SPW_EINVAL for one that fp16 does not hold: it would be infinity, and all that is computed with it no number.
 */
spw_status spw_st_round(void *out, spw_dtype dtype, const float *data, uint64_t count, const char *name, uint64_t first,
                        spw_error *err);
/*
 * Terms [first, first + count) of a parameter that is in terms, to tensor i as the fp32 numbers that they add up to; both are multiples of
 * SPW_TERMS. terms is scratch afterwards.
 */
spw_status
spw_st_write_terms(spw_st_writer *w, uint32_t i, uint64_t first, float *terms, uint64_t count, spw_error *err);

/* ---------------------------------------------------------------- Hugging Face's config.json */

/*
 * spw_hf_config_parse - a model's configuration from a config.json's text, or from a section of the same keys.
 *   name     in messages, for the file
 *   section  false: a config.json; keys that no family has are not looked at, dropout is left at 0. true: the section
 *            "model" of a training configuration, which messages put before the key; dropout counts.
 * Families  gpt2, llama, mistral, qwen2, qwen3, mixtral, qwen3_moe, phi3, smollm3, qwen2_moe, olmo2, gemma2, gemma3_text, gpt_oss, glm4_moe, deepseek_v2, deepseek_v3 (and kimi_k2, which is one), glm4_moe_lite, minimax_m2, olmo3, gemma, granite, olmoe, seed_oss, glm, glm4, ernie4_5, exaone4, ministral3, gpt_neox, opt, starcoder2, stablelm, qwen3_5_text, qwen3_5_moe_text, qwen3_next, gemma4_text, dots1, solar_open, ernie4_5_moe, hy_v3, hunyuan_v1_dense, hunyuan_v1_moe, cohere, cohere2, granitemoehybrid, llama4_text, deepseek_v32, glm_moe_dsa, exaone_moe, nemotron_h, deepseek_v4, mistral4, mimo_v2_flash, lfm2, lfm2_moe, bamba, afmoe, olmo_hybrid, falcon_h1, kimi_linear. A missing key has the default that the model's class has there, but
 *           vocab_size 256 and 1024 positions.
 * Errors    SPW_ECONFIG with name, key and value: not JSON, a value out of range, or another model than is computed here
 *           ("not supported yet"): families, activations, rope types, weights quantised in a form that is not read, mixed windows.
 */
spw_status
spw_hf_config_parse(spw_model_config *out, const char *json_text, const char *name, bool section, spw_error *err);
/* The same from folder/config.json. Errors also SPW_ENOENT and the like. */
spw_status spw_hf_config_load(spw_model_config *out, const char *folder, spw_error *err);
/*
 * The text of a folder's JSON with the word for infinity that Python writes, and JSON has not, as transformers 5 has it:
 * {"__float__": "Infinity"}. NULL: there is no memory; else the caller frees it (spw_mem_free).
 */
char *spw_hf_plain_json(const char *text);
/*
 * The text of a config.json that transformers loads and spw_hf_config_parse reads back the same, but for dropout. dtype is
 * that of the weights beside it; SPW_DTYPE_COUNT: the model's own keys only, for a section. spw_mem_free; NULL: no memory.
 */
char *spw_hf_config_text(const spw_model_config *config, spw_dtype dtype);
/*
 * Models of the hub by name (hub.c). find: the folder that "OWNER/NAME", or "OWNER/NAME@REVISION", has in the hub's cache on this machine, where
 * nothing lies at that path; false: there is none, and what is meant is the path itself. cache: where that is; false: nowhere. count: how many
 * commits of the model are there. name: whose folder of the cache this is, and of which commit. Nothing is fetched.
 */
enum { SPW_HUB_NAME_BYTES = 256, SPW_HUB_PATH_BYTES = 1024 };
bool spw_hub_find(char out[SPW_HUB_PATH_BYTES], const char *path);
bool spw_hub_cache(char out[SPW_HUB_PATH_BYTES]);
uint32_t spw_hub_count(const char *name);
bool spw_hub_name(const char *folder, char name[SPW_HUB_NAME_BYTES], char commit[SPW_HUB_NAME_BYTES]);
/*
 * SPW_ENOENT with what to do, where the path is not there and may be a model's name on the hub ("owner/name"), or where it has adapters
 * and no model; else SPW_OK.
 */
spw_status spw_hf_check_folder(const char *path, spw_error *err);
/*
 * The text of the source folder's own config.json, whatever else it says, with this dtype, not quantised, and of transformers' own class (no
 * auto_map); source NULL: the text above, and
 * so for a model of text and images, but for its token ids: the weights that are written are those of its text part.
 */
spw_status spw_hf_config_carry(char **text_out, const spw_model_config *config, const char *source, spw_dtype dtype,
                               spw_error *err);
/*
 * Copies what lies beside a model's weights: generation_config.json from the model's folder, the tokenizer's files and the chat template from the
 * tokenizer's, or its file. NULL: nothing.
 */
spw_status spw_hf_copy_companions(const char *model, const char *tokenizer, const char *to, spw_error *err);
/*
 * Removes the folder in which a model was being written when that was killed (spw_dir_partial), if there is one. SPW_ESYS (EEXIST)
 * naming what is in it besides a model's files: then it is somebody else's, and stays whole.
 */
spw_status spw_hf_remove_partial(const char *path, spw_error *err);
/* All keys that are read, one by one; NULL past the last. And whether a family has this one. */
const char *spw_hf_config_key(uint32_t i);
bool spw_hf_config_has_key(spw_family family, const char *key);

/* ---------------------------------------------------------------- the weights of a Hugging Face folder */

/*
 * spw_hf_reader_open - model.safetensors of a folder, or the shards of its model.safetensors.index.json; where there is neither, the same
 *          of pytorch_model.bin, files of torch.save; or one file.
 * Checks   every file as spw_st_reader_open does; that every shard is there and has the tensors listed for it, that all its
 *          tensors are listed, and none is in two shards.
 * Errors   SPW_ENOENT, SPW_ECORRUPT naming file and tensor, SPW_ENOMEM.
 * Threads  reads from any thread once it is open (and bound).
 */
typedef struct spw_hf_reader spw_hf_reader;
spw_status spw_hf_reader_open(spw_hf_reader **out, const char *path, spw_error *err);
void spw_hf_reader_close(spw_hf_reader *r); /* NULL is fine */
uint32_t spw_hf_reader_count(const spw_hf_reader *r);
/* Tensor i, shard by shard in the order of the files' bytes; NULL past the last. file (may be NULL): where it lies. */
const spw_tensor_info *spw_hf_reader_tensor(const spw_hf_reader *r, uint32_t i, const char **file);
/*
 * What the weights of a folder are known by, of any name and cut into files in any way: a sum over names, types, shapes and some bytes of
 * all tensors. Reads a KiB of each. Errors as of spw_hf_reader_open().
 */
spw_status spw_hf_fingerprint(const char *folder, uint64_t *out, spw_error *err);
/* Bytes of tensor i as they are in the file. */
spw_status spw_hf_read(spw_hf_reader *r, uint32_t i, uint64_t offset, void *data, uint64_t bytes, spw_error *err);
/* Whether the folder has one of these four; it may still be damaged. */
bool spw_hf_has_weights(const char *folder);
/*
 * Whether a folder without them has weights in a form or by a name that is not read, or adapters alone. what: the first such file, by name; of
 * adapters with the model that they are of.
 */
enum { SPW_HF_WHAT_BYTES = 256 };
bool spw_hf_has_other_weights(const char *folder, char what[SPW_HF_WHAT_BYTES]);
/* The name of the file of adapters that is there, which is read like one of weights; NULL: none. */
const char *spw_hf_adapters(const char *folder);
/*
 * spw_hf_reader_bind - finds every parameter of the model by its name; GPT-2's may begin with "transformer.".
 * Adapters of the model are passed over: they are no part of such a file. Buffers of old files (GPT-2's masks, rotary frequencies) are passed over; a tied model's lm_head.weight is compared.
 * Experts of gpt-oss may be MXFP4 ("..._blocks", "..._scales"), and those of Qwen3-VL in tensors of matrices (in, out): their files are then
 * mapped, and must not get shorter while the reader is open: a read that begins behind that is SPW_ECORRUPT, one that is under way a SIGBUS.
 * Matrices may be 8-bit floats (F8_E4M3) with an fp32, bf16 or fp16 number for each block beside them ("X.weight_scale_inv"). The blocks are those
 * of quantization_config.weight_block_size in the folder's config.json, and 128 x 128 where there is none.
 * Errors   SPW_ECORRUPT naming the tensor: missing, not the model's, another shape, another type than fp32, bf16 and fp16, a head
 *          that differs, 8-bit floats without scales, scales of other weights or of another shape; SPW_ECONFIG for a config.json
 *          that says nothing of 8-bit floats that are there.
 */
spw_status spw_hf_reader_bind(spw_hf_reader *r, const spw_model *model, spw_error *err);
/*
 * spw_hf_codes - as what codes a folder has its weights, to be kept as they are (spw_hf_read_codes).
 *   forms  (param_count) out  of each parameter; SPW_QUANT_NONE: numbers, as are all but matrices whose rows are whole groups of a scale, 16 to 128 columns
 *          of its block, or in gpt-oss' MXFP4, in up to SPW_FORMS_MAX forms
 *   dtype  of weights, fp32 or bf16
 * A folder without files of weights has what its config.json says: all matrices of layers but routers, and those that its lists leave out, with scales
 * in bf16 where integers are packed. A file of its own has no config.json: codes of 8 bits.
 * Errors  SPW_ECONFIG, naming the folder: it has no codes, or none that can be kept; those of the reader.
 */
spw_status spw_hf_codes(spw_quant *forms, const char *folder, const spw_model *model, spw_dtype dtype, spw_error *err);
/* The same of a folder that is open, with that model bound. Returns whether there are any. */
bool spw_hf_reader_codes(spw_quant *forms, const spw_hf_reader *r, const spw_model *model, spw_dtype dtype);
/*
 * spw_hf_read_codes - elements [first, first + count) of a bound model's parameter as blocks or strips in that form, which spw_hf_codes said of it; what
 * the last block has behind them is zero.
 *   first, count  begin at a whole block or strip, and end at one or with the parameter
 * Codes come past the page cache and are summed, as in spw_hf_read_run, whose buffers it needs; scales are not.
 * Errors  SPW_ECORRUPT  a code or a scale is no finite number, or a scale so great that a product might be none
 */
spw_status spw_hf_read_codes(spw_hf_reader *r, uint32_t param_id, spw_quant form, uint64_t first, uint64_t count,
                             void *blocks, spw_error *err);
/* Where a bound model's parameter lies, and its type there; false: it is none of the file's (an adapter), or there as codes. */
bool spw_hf_reader_extent(const spw_hf_reader *r, uint32_t param_id, spw_st_extent *out, spw_dtype *dtype);
/* The name of a bound parameter's tensor, and the parameter's first element in it; NULL: there is none. */
const char *spw_hf_bound_name(const spw_hf_reader *r, uint32_t param_id, uint64_t *first);
/* Elements first to first + count of a bound model's parameter, fp32 from whatever is stored; of 8-bit floats the product in fp32. */
/*
 * spw_hf_read_run - the same elements, handed to take in order, a multiple of 64 at a time but for the last: numbers of one tensor come past
 * the page cache and are summed, codes as spw_hf_read_param reads them. Of terms first and count are multiples of SPW_TERMS, and so
 * many come at a time. Needs spw_hf_reader_past_cache, which lends buffers until the reader is closed.
 * spw_hf_reader_sum: of a reader of one file, and its bytes.
 */
spw_st_sum spw_hf_reader_sum(const spw_hf_reader *r, bool header, uint64_t *file_bytes);
typedef spw_status (*spw_hf_take_fn)(void *ctx, uint64_t first, const float *data, uint64_t count, spw_error *err);
void spw_hf_reader_past_cache(spw_hf_reader *r, spw_bounce *bounce);
spw_status spw_hf_read_run(spw_hf_reader *r, uint32_t param_id, uint64_t first, uint64_t count, spw_hf_take_fn take,
                           void *ctx, spw_error *err);
spw_status
spw_hf_read_param(spw_hf_reader *r, uint32_t param_id, uint64_t first, uint64_t count, float *out, spw_error *err);

/* ---------------------------------------------------------------- other programs' checkpoints */

/*
 * A checkpoint that another program wrote, by any number of ranks: the parts of each tensor are read where they lie in the ranks' files, nothing
 * is put together elsewhere. Pickles in it are read and never run. All files are open at once, those whose tensors are read twice, so RLIMIT_NOFILE
 * must allow that (the program raises it). Three kinds are known:
 *   DeepSpeed  what save_checkpoint() writes in ZeRO stage 1, 2 or 3, also with state that was on NVMe
 *   PyTorch    torch.distributed.checkpoint, of a model and its optimizer, as FSDP's users write it; tensors are cut by rows. Or a full
 *              state dict: optimizer.bin, by names, beside pytorch_model_fsdp.bin or a Hugging Face folder's weights
 *   llm.c      model_00000040.bin, the ranks' state_00000040_00000.bin and so on, and DONE_00000040, in a folder of several
 *
 *   find     path: a folder of one, or what save_checkpoint() was given, whose file "latest" names one, or of llm.c's, of which the last is meant,
 *            or the model's file of one of these. found: its folder, or that file; false: it is none
 *   open     Errors  SPW_ECORRUPT naming file and what is damaged or missing, SPW_EUNSUPPORTED (cut into parts of a model), SPW_ENOMEM
 *   check_state  whether moments can be read. Errors  why not (of PyTorch's): no fp32, damaged, or another optimizer's; its weights can, then
 *   weights  the masters, and frozen parameters, as they are stored; to be bound. The caller's
 *   moments  of the bound weights' parameters that were trained: tensors "PARAMETER.MOMENT" of these names (count), fp32. The caller's too.
 *            Errors  SPW_ECONFIG naming a moment that its optimizer does not keep, and check_state's
 *   config   its configuration as JSON text; NULL: it has none
 *   model    the model that it is of; NULL: it does not say
 *   trained  whether a tensor of this name was trained; decay: its weight decay, NAN where the checkpoint does not say
 */
enum { SPW_FOREIGN_MOMENTS_MAX = 4 };
typedef struct spw_foreign spw_foreign;
typedef struct spw_foreign_about {
    char maker[16], version[32];         /* "DeepSpeed", "0.19.8"; "": it does not say */
    uint32_t stage, ranks, moment_count; /* stage: of ZeRO; 0: another kind */
    uint64_t steps, updates;             /* updates: steps that were not skipped */
    uint64_t samples;                    /* UINT64_MAX: it does not say */
    char moments[SPW_FOREIGN_MOMENTS_MAX][40];
    bool uneven;     /* parameters have made different numbers of updates, some fewer than updates */
    bool hf_weights; /* its masters are the weights in Hugging Face's files of its folder */
    bool scaled;     /* with a dynamic loss scale, of which what follows */
    double scale;
    int64_t hysteresis, scaler_steps, last_overflow;
    double clip, beta1, beta2, eps; /* of gradients' norm; of the first group. NAN: it does not say */
    char config_name[200];          /* of DeepSpeed's configuration, where that is all it has of one; "": it is there */
} spw_foreign_about;
bool spw_foreign_find(const char *path, char *found, uint64_t bytes);
spw_status spw_foreign_open(spw_foreign **out, const char *found, spw_error *err);
void spw_foreign_close(spw_foreign *f); /* NULL is fine */
const spw_foreign_about *spw_foreign_get_about(const spw_foreign *f);
const char *spw_foreign_config(const spw_foreign *f);
const spw_model_config *spw_foreign_model(const spw_foreign *f);
spw_status spw_foreign_check_state(const spw_foreign *f, spw_error *err);
bool spw_foreign_trained(const spw_foreign *f, const char *name, double *decay);
spw_status spw_foreign_weights(spw_foreign *f, spw_hf_reader **out, spw_error *err);
spw_status spw_foreign_moments(spw_foreign *f, const spw_hf_reader *weights, const spw_model *model,
                               const char *const *names, uint32_t count, spw_st_reader **out, spw_error *err);

/* ---------------------------------------------------------------- conversions */

/*
 * spw_export - writes a Hugging Face folder from another one, from a checkpoint (fp32: its masters) or one of another program (its masters, also
 *   where a Hugging Face folder's weights lie beside it), or from llm.c's weights.
 *   Adapters in the folder (spw_hf_adapters, with adapter_config.json) are merged: W + alpha / rank B A (use_rslora: over the rank's root), in
 *   fp32 and rounded once; those of experts' tensors by the names of target_parameters, as peft 0.21 has them with transformers 5. The weights
 *   may be in a folder of their own.
 *   config.json keeps what the source's says besides; tokenizer files come along. The folder appears when all is on disk.
 * Memory  3 MiB for each of up to four threads, the names and one adapter.
 * Errors  SPW_ESYS (EEXIST) when `to` exists, SPW_ENOSPC, SPW_EINVAL of a weight that fp16 has no number for, and the readers'. Nothing is left
 *         behind.
 */
typedef struct spw_export_options {
    const char *source, *to;
    /* The folder whose config.json and tokenizer belong to it; NULL: source, as in all but DeepSpeed's and FSDP's. Of adapters alone: whose
     * weights they are beside; NULL: the folder that adapter_config.json names. */
    const char *model;
    spw_dtype dtype;      /* SPW_DTYPE_COUNT: as it is stored; for codes that of the other parameters, or bf16 */
    uint64_t shard_bytes; /* no file has more tensor bytes unless one tensor has; 0: one file */
    void (*progress)(void *ctx, uint64_t done_bytes, uint64_t all_bytes); /* now and then; may be NULL */
    void *progress_ctx;
} spw_export_options;
typedef struct spw_export_report {
    uint64_t params, bytes;
    uint32_t tensors, files;
    spw_dtype dtype;
} spw_export_report;
spw_status spw_export(const spw_export_options *options, spw_export_report *report, spw_error *err);

/* ---------------------------------------------------------------- files and folders */

/*
 * All bytes at offset; SPW_ECORRUPT when the file ends before them. path for messages. Any threads at once. Each read is a call
 * that spw_test_fail_call() counts.
 */
spw_status spw_file_read_at(int fd, const char *path, void *data, uint64_t bytes, uint64_t offset, spw_error *err);
/* Bytes of the byte order mark that text in UTF-8 may begin with, as some editors write it: 3, or 0. */
uint64_t spw_text_mark(const char *text, uint64_t bytes);
/*
 * Whole files of at most bytes_max, one zero byte behind what is read; spw_mem_free. read_text: without a byte order mark; SPW_ECORRUPT for one
 * with a zero byte, which is no text. write: temporary file in the same folder, fsync, rename, fsync of the folder.
 */
spw_status spw_file_read(const char *path, uint64_t bytes_max, void **out, uint64_t *bytes, spw_error *err);
spw_status spw_file_read_text(const char *path, uint64_t bytes_max, char **text_out, spw_error *err);
spw_status spw_file_write_text(const char *path, const char *text, spw_error *err);
spw_status
spw_file_write(const char *path, const void *data, uint64_t bytes, spw_error *err); /* the same of any bytes */
/* Opens a file of lines to add some, and begins with a line's end where the last one was torn, by a full disk say. NULL: errno says why. */
FILE *spw_file_append_lines(const char *path);
bool spw_dir_has(const char *folder, const char *name);    /* something of that name is there */
spw_status spw_dir_make(const char *path, spw_error *err); /* with parents; the names of new ones are durable */
/* Before so many bytes go to a folder: SPW_ENOSPC with them and what is free, and with what to do. */
spw_status spw_dir_check_room(const char *folder, uint64_t bytes, const char *remedy, spw_error *err);
/* Where a folder is written before it has its name: beside it, with ".partial" behind. False: out is too small. */
bool spw_dir_partial(const char *path, char *out, size_t bytes);
spw_status spw_dir_sync(const char *path, spw_error *err);
spw_status
spw_dir_sync_above(const char *path, spw_error *err);        /* the folder that holds path: its name is durable then */
spw_status spw_dir_remove(const char *path, spw_error *err); /* files and folders below, without following links */

#ifdef __cplusplus
}
#endif
#endif
