/*
 * Training data that is not what it says is refused by file, field and offset.
 */
#include "lib_dataset.h"
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cmocka.h>

/* No match, empty files and files that are too short, each with what a person needs to know. */
static void
test_errors(void **state)
{
    spw_data *d = NULL;
    spw_error err = {0};
    (void)state;
    dataset_write_windows("empty", 0, 0);
    dataset_write_windows("short", T, 0);
    assert_int_equal(dataset_try(&d, "*.none", 0.1, 1, &err), SPW_ENOENT);
    assert_non_null(strstr(err.message, ".none"));
    assert_int_equal(dataset_try(&d, "empty", 0.1, 1, &err), SPW_EINVAL);
    assert_non_null(strstr(err.message, "empty"));
    assert_int_equal(dataset_try(&d, "*", 0.1, 1, &err), SPW_EINVAL);
    assert_non_null(strstr(err.message, "10 bytes"));
    assert_non_null(strstr(err.message, "needs 11"));
}

static void
test_refused_llmc(void **state)
{
    spw_data_options o = dataset_options("a.bin");
    int32_t tokens[T], targets[T];
    spw_error err = {0};
    spw_data *d;
    (void)state;
    dataset_write_llmc("a.bin", 20240520, 1, 31, 0);
    dataset_patch("a.bin", 0, 1234, 4);
    dataset_refuse(&o, SPW_ECORRUPT, "a.bin", "magic at offset 0 is 1234", "no .idx", NULL);
    o.format = SPW_DATA_LLMC;
    dataset_refuse(&o, SPW_ECORRUPT, "a.bin", "magic at offset 0 is 1234", NULL);
    o.format = SPW_DATA_AUTO;
    dataset_patch("a.bin", 0, 20240326, 4);
    dataset_refuse(&o, SPW_EUNSUPPORTED, "a.bin is llm.c's weights", "20240326", NULL);
    dataset_patch("a.bin", 0, 20240520, 4);
    dataset_patch("a.bin", 4, 7, 4);
    dataset_refuse(&o, SPW_EUNSUPPORTED, "a.bin", "version at offset 4 is 7", NULL);
    dataset_patch("a.bin", 4, 1, 4);
    dataset_patch("a.bin", 8, 32, 4);
    dataset_refuse(&o, SPW_ECORRUPT, "a.bin", "token count at offset 8 is 32", "1088 bytes", "it has 1086", "truncated",
                   NULL);
    dataset_patch("a.bin", 8, 30, 4);
    dataset_refuse(&o, SPW_ECORRUPT, "token count at offset 8 is 30", "it has 1086", NULL);
    dataset_patch("a.bin", 8, 0x80000001, 4);
    dataset_refuse(&o, SPW_ECORRUPT, "token count at offset 8 is negative", NULL);
    dataset_patch("a.bin", 8, 31, 4);
    assert_int_equal(truncate(dataset_path("a.bin"), 1000), 0);
    dataset_refuse(&o, SPW_ECORRUPT, "a.bin has 1000 bytes", NULL);
    assert_int_equal(truncate(dataset_path("a.bin"), 0), 0);
    dataset_refuse(&o, SPW_ECORRUPT, "a.bin", NULL);
    /* A token that is too large is found when its window is read; a file that was cut meanwhile too. */
    dataset_write_llmc("a.bin", 20240520, 1, T + 1, 0);
    dataset_patch("a.bin", 1024 + 2 * 4, 300, 2);
    o.vocab = 256;
    d = dataset_open(&o);
    assert_int_equal(spw_data_fill(d, SPW_SPLIT_TRAIN, 0, 1, tokens, targets, &err), SPW_ECORRUPT);
    assert_non_null(strstr(err.message, "a.bin: token 300 at position 4 (byte 1032)"));
    assert_non_null(strstr(err.message, "vocabulary of 256"));
    assert_int_equal(truncate(dataset_path("a.bin"), 1030), 0);
    assert_int_equal(spw_data_fill(d, SPW_SPLIT_TRAIN, 0, 1, tokens, targets, &err), SPW_ECORRUPT);
    assert_non_null(strstr(err.message, "a.bin ends at byte 1030"));
    spw_data_close(d);
}

static void
test_refused_llmq(void **state)
{
    spw_data_options o = dataset_options("a.bin");
    (void)state;
    dataset_write_llmq("a.bin", 2, 31, 0, true);
    dataset_patch("a.bin", 8, 3, 4);
    dataset_refuse(&o, SPW_EUNSUPPORTED, "a.bin", "version at offset 8 is 3", NULL);
    dataset_patch("a.bin", 8, 2, 4);
    dataset_patch("a.bin", 12, 2, 4);
    dataset_refuse(&o, SPW_EUNSUPPORTED, "a token has 2 bytes", NULL);
    dataset_patch("a.bin", 12, 4, 4);
    dataset_patch("a.bin", 16, 40, 4);
    dataset_refuse(&o, SPW_ECORRUPT, "token count at offset 16 is 40", "1184 bytes, or 1189", "it has 1152", NULL);
    dataset_patch("a.bin", 16, 0x80000001, 4);
    dataset_refuse(&o, SPW_ECORRUPT, "token count at offset 16 is negative", NULL);
    dataset_patch("a.bin", 16, 31, 4);
    assert_int_equal(truncate(dataset_path("a.bin"), 1100), 0);
    dataset_refuse(&o, SPW_ECORRUPT, "it has 1100", "truncated", NULL);
    assert_int_equal(truncate(dataset_path("a.bin"), 1000), 0);
    dataset_refuse(&o, SPW_ECORRUPT, "a.bin has 1000 bytes", NULL);
    o.format = SPW_DATA_LLMQ;
    dataset_write_llmc("a.bin", 20240520, 1, 31, 0);
    dataset_refuse(&o, SPW_ECORRUPT, "does not begin with BIN.TOK", NULL);
}

static void
test_refused_megatron(void **state)
{
    static const uint32_t lengths[] = {12, 20, 19};
    static const uint64_t documents[] = {0, 2, 3};
    spw_data_options o = dataset_options("m");
    (void)state;
    for (int k = 0; k < 14; k++) {
        const long pointers = 34 + 12, docs = pointers + 24;
        dataset_write_megatron("m", 4, 4, 0, lengths, 3, documents, 3);
        switch (k) {
        case 0: dataset_patch("m.idx", 3, 'X', 1), dataset_refuse(&o, SPW_ECORRUPT, "m.idx", "offset 0", NULL); break;
        case 1:
            dataset_patch("m.idx", 9, 2, 8),
                dataset_refuse(&o, SPW_EUNSUPPORTED, "m.idx", "version at offset 9 is 2", NULL);
            break;
        case 2:
            dataset_patch("m.idx", 17, 7, 1),
                dataset_refuse(&o, SPW_EUNSUPPORTED, "dtype at offset 17 is 7", "float", NULL);
            break;
        case 3:
            dataset_patch("m.idx", 17, 9, 1), dataset_refuse(&o, SPW_ECORRUPT, "dtype at offset 17 is 9", NULL);
            break;
        case 4:
            dataset_patch("m.idx", 18, 1ull << 60, 8), dataset_refuse(&o, SPW_ECORRUPT, "m.idx", "offset 18", NULL);
            break;
        case 5:
            dataset_patch("m.idx", 26, UINT64_MAX, 8), dataset_refuse(&o, SPW_ECORRUPT, "m.idx", "offset 26", NULL);
            break;
        case 6:
            dataset_patch("m.idx", 34 + 4, 0xffffffff, 4),
                dataset_refuse(&o, SPW_ECORRUPT, "sequence 1 at offset 38", NULL);
            break;
        case 7:
            dataset_patch("m.idx", pointers + 8, 44, 8);
            dataset_refuse(&o, SPW_ECORRUPT, "pointer of sequence 1 at offset 54 is 44", "end at 48", NULL);
            break;
        case 8:
            assert_int_equal(truncate(dataset_path("m.bin"), 200), 0);
            dataset_refuse(&o, SPW_ECORRUPT, "m.idx: sequence 2 (pointer at offset 62, length at 42)",
                           "ends at byte 204", "m.bin", "which has 200", NULL);
            break;
        case 9:
            dataset_patch("m.idx", docs, 1, 8), dataset_refuse(&o, SPW_ECORRUPT, "document index 0 at offset 70", NULL);
            break;
        case 10:
            dataset_patch("m.idx", docs + 8, 4, 8),
                dataset_refuse(&o, SPW_ECORRUPT, "document index 1 at offset 78", NULL);
            break;
        case 11:
            dataset_patch("m.idx", docs + 16, 2, 8), dataset_refuse(&o, SPW_ECORRUPT, "document index 2", NULL);
            break;
        case 12:
            assert_int_equal(truncate(dataset_path("m.idx"), docs + 23), 0);
            dataset_refuse(&o, SPW_ECORRUPT, "m.idx", "truncated", NULL);
            break;
        default:
            assert_int_equal(truncate(dataset_path("m.idx"), docs + 27), 0);
            dataset_refuse(&o, SPW_EUNSUPPORTED, "m.idx", "multimodal", NULL);
        }
    }
    dataset_write_megatron("m", 4, 4, 0, lengths, 3, documents, 3);
    unlink(dataset_path("m.bin"));
    dataset_refuse(&o, SPW_ENOENT, "m.bin", NULL);
    o = dataset_options("x.idx");
    dataset_write_text("x.idx", "something else");
    dataset_refuse(&o, SPW_ECORRUPT, "x.idx", "MMIDIDX", NULL);
}

static void
test_refused_others(void **state)
{
    spw_data_options o = dataset_options("x");
    (void)state;
    dataset_write_bytes("x", "\x1f\x8b\x08 and so on, long enough", 24);
    dataset_refuse(&o, SPW_EUNSUPPORTED, "/x is compressed with gzip", NULL);
    dataset_write_text("x", "PAR1 and so on, long enough");
    dataset_refuse(&o, SPW_EUNSUPPORTED, "/x is a Parquet table", NULL);
    o.format = SPW_DATA_TEXT;
    spw_data_close(dataset_open(&o));
    o = dataset_options("l.jsonl");
    dataset_write_text("l.jsonl", "{\"text\": \"fine\"}\n{\"text\": \"cut\n");
    dataset_refuse(&o, SPW_ECORRUPT, "l.jsonl: line 2 (byte 17)", "not JSON", NULL);
    dataset_write_text("l.jsonl", "{\"text\": \"fine\"}\n[1]\n");
    dataset_refuse(&o, SPW_ECORRUPT, "l.jsonl: line 2 (byte 17)", "not a JSON object", NULL);
    dataset_write_text("l.jsonl", "{\"text\": \"a\", \"text\": \"b\"}\n");
    dataset_refuse(&o, SPW_ECORRUPT, "l.jsonl: line 1", NULL);
    dataset_write_text("l.jsonl", "\n\n");
    dataset_refuse(&o, SPW_EINVAL, "l.jsonl", "0 tokens", NULL);
    o.end_of_text_set = true;
    o.end_of_text = 300;
    o.vocab = 256;
    dataset_refuse(&o, SPW_EINVAL, "token 300", "256", NULL);
    o.end_of_text_set = false;
    assert_int_equal(truncate(dataset_path("l.jsonl"), 65 << 20), 0); /* two line ends, and a line of zeros */
    dataset_refuse(&o, SPW_EUNSUPPORTED, "l.jsonl: line 3 (byte 2) has more than 64 MiB", NULL);
    o = dataset_options("fifo");
    assert_int_equal(mkfifo(dataset_path("fifo"), 0600), 0);
    dataset_refuse(&o, SPW_EUNSUPPORTED, "fifo is not a file", NULL);
    o = dataset_options("folder");
    assert_int_equal(mkdir(dataset_path("folder"), 0700), 0);
    dataset_refuse(&o, SPW_EINVAL, "folder: only folders", NULL);
}

/* JSON in files named .json: a line each is read, what is not lines is refused with what makes it so. */
static void
test_json(void **state)
{
    spw_data_options o = dataset_options("j.json");
    (void)state;
    dataset_write_text("j.json", "\n {\"text\": \"words of\"}\n{\"text\": \"a text\"}\n");
    {
        spw_data *d = dataset_open(&o);
        assert_string_equal(spw_data_formats(d), "jsonl");
        assert_int_equal(spw_data_tokens(d), strlen("words of\na text\n"));
        spw_data_close(d);
    }
    dataset_write_text("j.json", "\xef\xbb\xbf{\"text\": \"words\"}\r\n\xef\xbb\xbf{\"text\": \"of a text\"}");
    for (int k = 0; k < 2; k++) { /* editors of Windows put a mark before it, and files are put together */
        spw_data *d = dataset_open(&o);
        assert_string_equal(spw_data_formats(d), "jsonl");
        assert_int_equal(spw_data_tokens(d), strlen("words\nof a text\n"));
        spw_data_close(d);
        (void)rename(dataset_path("j.json"), dataset_path("j.jsonl"));
        o = dataset_options("j.jsonl");
    }
    o = dataset_options("j.json");
    dataset_write_text("j.json", "[{\"text\": \"words\"},\n{\"text\": \"of a text\"}]\n");
    dataset_refuse(&o, SPW_EUNSUPPORTED, "j.json is a JSON array", "jq -c '.[]' ", "j.json >", "j.jsonl", NULL);
    dataset_write_text("j.json", "{\n  \"text\": \"words of a text\"\n}\n");
    dataset_refuse(&o, SPW_ECORRUPT, "j.json", "jq -c .", "not JSON", NULL);
    dataset_write_text("j.json", "\"words of a text\"\n");
    {
        spw_data *d = dataset_open(&o);
        assert_string_equal(spw_data_formats(d), "text");
        spw_data_close(d);
    }
    o.format = SPW_DATA_TEXT;
    dataset_write_text("j.json", "[\"words\", \"of\", \"a text\"]\n");
    spw_data_close(dataset_open(&o));
}

/* What only JSON lines have a use for is refused where there are none, before text is tokenised. */
static void
test_settings_for_lines(void **state)
{
    spw_data_options o = dataset_options("t.txt");
    const spw_data_source sources[] = {{dataset_path("t.txt"), 1}, {dataset_path("l.jsonl"), 1}};
    (void)state;
    dataset_write_text("t.txt", "words of a text\n");
    dataset_write_text("l.jsonl", "{\"text\": \"words of a text\"}\n");
    o.documents = SPW_DOCUMENTS_WHOLE; /* which text has a use for */
    spw_data_close(dataset_open(&o));
    o.lines_for = "data.chat";
    dataset_refuse(&o, SPW_ECONFIG, "data.chat is for JSON lines", "t.txt is read as text", "data.format jsonl", NULL);
    o.pattern_count = 0;
    o.sources = sources;
    o.source_count = 2;
    spw_data_close(dataset_open(&o));
}

/* A glob for folders of any depth would leave files out without a word. */
static void
test_refused_depth(void **state)
{
    spw_data_options o = dataset_options("**/x.txt");
    (void)state;
    dataset_write_windows("x.txt", 100, 0);
    dataset_refuse(&o, SPW_EINVAL, "**/x.txt", "** does not stand for folders of any depth", NULL);
    dataset_write_windows("x**y.txt", 100, 0);
    o = dataset_options("x**y.txt");
    spw_data_close(dataset_open(&o));
}

/* Binary files are named, whatever they are called; bytes of them are tokens on request. */
static void
test_refused_binary(void **state)
{
    static const struct {
        const char *bytes;
        size_t count;
        const char *what, *advice;
    } files[] = {
        {"ARROW1\0\0 and so on, long enough", 28, "is an Arrow table", "to_json()"},
        {"\xff\xff\xff\xff\x10\x01\0\0 and so on, long enough", 28, "is a stream of Arrow tables", "to_json()"},
        {"PAR1 and so on, long enough", 27, "is a Parquet table", "to_json()"},
        {"PK\x03\x04 and so on, long enough", 27, "is a zip archive", "unzip"},
        {"\x1f\x8b\x08 and so on, long enough", 26, "is compressed with gzip", "gunzip"},
        {"\x28\xb5\x2f\xfd and so on, long enough", 27, "is compressed with zstd", "unzstd"},
        {"\x93NUMPY and so on, long enough", 29, "is a NumPy array", "llm.c"},
        {"\xff\xfeT\0e\0x\0t\0\n\0", 12, "is text in UTF-16", "iconv"},
        {"\xfe\xff\0T\0e\0x\0t\0\n", 12, "is text in UTF-16", "iconv"},
        {"%PDF-1.7 and so on, long enough", 31, "is a PDF", "pdftotext"},
        {"\x12\0\0\0\0\0\0\0{\"__metadata__\":{}}", 27, "is a safetensors file", "model.path"},
    };
    (void)state;
    for (size_t i = 0; i < sizeof files / sizeof files[0]; i++) {
        const char *name = i % 2 == 0 ? "x.txt" : "x.jsonl";
        spw_data_options o = dataset_options(name);
        dataset_write_bytes(name, files[i].bytes, files[i].count);
        dataset_refuse(&o, SPW_EUNSUPPORTED, name, files[i].what, files[i].advice, "data.format text", NULL);
        o.format = SPW_DATA_TEXT;
        spw_data_close(dataset_open(&o));
    }
    { /* tokens of Megatron may begin as any of them */
        static const uint32_t lengths[] = {30};
        static const uint64_t documents[] = {0, 1};
        spw_data_options o = dataset_options("m.bin");
        dataset_write_megatron("m", 8, 2, 0x8b1f, lengths, 1, documents, 2);
        spw_data_close(dataset_open(&o));
    }
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        IN_DIR(test_errors),
        IN_DIR(test_refused_llmc),
        IN_DIR(test_refused_llmq),
        IN_DIR(test_refused_megatron),
        IN_DIR(test_refused_others),
        IN_DIR(test_json),
        IN_DIR(test_settings_for_lines),
        IN_DIR(test_refused_binary),
        IN_DIR(test_refused_depth),
    };
    return cmocka_run_group_tests_name("data_refused", tests, NULL, NULL);
}
