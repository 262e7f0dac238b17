/* A node that costs next to nothing: `node EVENTS GAP_MS`. It prints the port it took.
 *
 * It speaks enough of vLLM to be probed as one. A call with "stream":true gets EVENTS events and [DONE]: all in one write
 * when GAP_MS is 0, else one each GAP_MS. Any other POST gets one JSON answer. One thread, epoll, loopback only.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

typedef struct line {
    int fd, left; /* left: events still to be sent */
    long due;     /* when the next one is, in us */
    size_t held, room;
    char *in;
    struct line *next, *before; /* those that stream */
} line;

typedef struct {
    char *bytes;
    size_t size;
} text;

static int events, gap_ms;
static line streaming = {.next = &streaming, .before = &streaming};
static text head, whole, models, metrics, nothing, burst, event, last;

static long now_us(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return at.tv_sec * 1000000L + at.tv_nsec / 1000;
}

static int put(int fd, text what) {
    while (what.size) {
        ssize_t sent = write(fd, what.bytes, what.size);
        if (sent < 0 && errno != EAGAIN) return -1;
        if (sent < 0) {
            struct pollfd wait = {.fd = fd, .events = POLLOUT};
            poll(&wait, 1, 10);
            continue;
        }
        what.bytes += sent;
        what.size -= (size_t)sent;
    }
    return 0;
}

static text page(const char *kind, const char *body) {
    text made;
    made.size = (size_t)asprintf(&made.bytes, "HTTP/1.1 200 OK\r\ncontent-type: %s\r\ncontent-length: %zu\r\n\r\n%s", kind,
                                 strlen(body), body);
    return made;
}

static text chunk(const char *data, const char *after) {
    text made;
    made.size = (size_t)asprintf(&made.bytes, "%zx\r\n%s\r\n%s", strlen(data), data, after);
    return made;
}

static void write_answers(void) {
    const char *json = "application/json";
    whole = page(json, "{\"id\":\"chatcmpl-1\",\"object\":\"chat.completion\",\"created\":1700000000,\"model\":\"tiny\","
                       "\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"hello there, how can I"
                       " help you today?\"},\"logprobs\":null,\"finish_reason\":\"stop\"}],\"usage\":{\"prompt_tokens\":12,"
                       "\"completion_tokens\":9,\"total_tokens\":21}}");
    models = page(json, "{\"object\":\"list\",\"data\":[{\"id\":\"tiny\",\"object\":\"model\",\"created\":1,"
                        "\"owned_by\":\"vllm\",\"max_model_len\":32768}]}");
    metrics = page("text/plain", "vllm:num_requests_running{model_name=\"tiny\"} 0\n"
                                 "vllm:num_requests_waiting{model_name=\"tiny\"} 0\n"
                                 "vllm:kv_cache_usage_perc{model_name=\"tiny\"} 0.0\n");
    nothing = page(json, "{}");
    head.size = (size_t)asprintf(&head.bytes, "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
                                              "transfer-encoding: chunked\r\n\r\n");
    event = chunk("data: {\"id\":\"chatcmpl-1\",\"object\":\"chat.completion.chunk\",\"created\":1700000000,\"model\":\"tiny\","
                  "\"choices\":[{\"index\":0,\"delta\":{\"content\":\" token\"},\"logprobs\":null,\"finish_reason\":null}]}"
                  "\n\n", "");
    last = chunk("data: [DONE]\n\n", "0\r\n\r\n");
    burst.size = head.size + event.size * (size_t)events + last.size;
    char *at = burst.bytes = malloc(burst.size);
    at = mempcpy(at, head.bytes, head.size);
    for (int i = 0; i < events; i++) at = mempcpy(at, event.bytes, event.size);
    memcpy(at, last.bytes, last.size);
}

static void part(line *one) {
    if (!one->next) return;
    one->next->before = one->before;
    one->before->next = one->next;
    one->next = one->before = NULL;
}

static void answer(line *one, const char *request, const char *body, size_t size) {
    if (!strncmp(request, "GET /v1/models", 14)) {
        put(one->fd, models);
    } else if (!strncmp(request, "GET /metrics", 12)) {
        put(one->fd, metrics);
    } else if (!strncmp(request, "GET", 3)) {
        put(one->fd, nothing);
    } else if (!memmem(body, size, "\"stream\":true", 13)) {
        put(one->fd, whole);
    } else if (!gap_ms) {
        put(one->fd, burst);
    } else {
        put(one->fd, head);
        part(one);
        one->left = events + 1;
        one->due = now_us() + gap_ms * 1000L;
        one->next = streaming.next;
        one->before = &streaming;
        streaming.next->before = one;
        streaming.next = one;
    }
}

/* Answer every whole request that has come; 0 when the peer has gone. */
static int hear(line *one) {
    int open = 1;
    for (;;) {
        if (one->held + 1 >= one->room) one->in = realloc(one->in, one->room *= 2);
        ssize_t got = read(one->fd, one->in + one->held, one->room - one->held - 1);
        if (got <= 0) {
            open = got < 0 && errno == EAGAIN;
            break;
        }
        one->held += (size_t)got;
    }
    one->in[one->held] = 0;
    char *end;
    while ((end = memmem(one->in, one->held, "\r\n\r\n", 4))) {
        *end = 0;
        char *length = strcasestr(one->in, "\r\ncontent-length:");
        size_t before = (size_t)(end - one->in) + 4, size = length ? (size_t)atol(length + 17) : 0;
        *end = '\r';
        if (one->held < before + size) break;
        answer(one, one->in, one->in + before, size);
        one->held -= before + size;
        memmove(one->in, one->in + before + size, one->held + 1);
    }
    return open;
}

static void tick(void) {
    long now = now_us();
    for (line *one = streaming.next, *next; one != &streaming; one = next) {
        next = one->next;
        if (one->due > now) continue;
        one->due += gap_ms * 1000L;
        if (put(one->fd, --one->left ? event : last) < 0 || !one->left) part(one);
    }
}

int main(int count, char **words) {
    if (count != 3) return fprintf(stderr, "usage: node EVENTS GAP_MS\n"), 2;
    events = atoi(words[1]), gap_ms = atoi(words[2]);
    signal(SIGPIPE, SIG_IGN);
    write_answers();
    int yes = 1, door = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0), loop = epoll_create1(0);
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof at;
    if (bind(door, (struct sockaddr *)&at, size) || listen(door, 1024)) return perror("node"), 1;
    getsockname(door, (struct sockaddr *)&at, &size);
    printf("%d\n", ntohs(at.sin_port)), fflush(stdout);
    struct epoll_event told = {.events = EPOLLIN}, got[256];
    epoll_ctl(loop, EPOLL_CTL_ADD, door, &told);
    for (;;) {
        int ready = epoll_wait(loop, got, 256, gap_ms ? 1 : -1);
        for (int i = 0; i < ready; i++) {
            line *one = got[i].data.ptr;
            for (int fd; !one && (fd = accept4(door, NULL, NULL, SOCK_NONBLOCK)) >= 0;) {
                setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
                told.data.ptr = calloc(1, sizeof(line));
                *(line *)told.data.ptr = (line){.fd = fd, .room = 65536, .in = malloc(65536)};
                epoll_ctl(loop, EPOLL_CTL_ADD, fd, &told);
            }
            if (one && !hear(one)) {
                part(one);
                close(one->fd);
                free(one->in);
                free(one);
            }
        }
        if (gap_ms) tick();
    }
}
