package browser

import (
	"context"
	"fmt"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/chromedp"

	"github.com/lanekeeper/lanekeeper/internal/debian"
)

// started is the one browser of this test binary. No test closes the browser: it ends when the test binary ends and its
// debugging pipe closes.
var started struct {
	once sync.Once
	ctx  context.Context // chromedp stores the process in the context
	stop func()
	err  error
}

// Tests wraps testing.M for a package that opens pages. Use Tests in TestMain.
type Tests struct{ M interface{ Run() int } }

// Run runs the tests and then ends the browser.
func (t Tests) Run() int {
	code := t.M.Run()
	if started.stop != nil {
		started.stop()
	}
	return code
}

// process returns the context of the browser, which the first test starts.
func process(tb testing.TB) context.Context {
	tb.Helper()
	started.once.Do(func() { started.ctx, started.stop, started.err = start() })
	if started.err != nil {
		tb.Fatalf("start a browser: %v", started.err)
	}
	return started.ctx
}

// start runs the browser. Without the flags about the background it contacts its maker's hosts.
func start() (context.Context, func(), error) {
	binary, err := debian.Program{
		Package: "chromium", Setting: "AGENT_TEST_BROWSER",
		Names: []string{"chromium", "chromium-browser", "google-chrome"},
	}.Find(context.Background(), func(string) {})
	if err != nil {
		return nil, nil, err
	}
	profile, err := os.MkdirTemp("", "lanekeeper-browser-")
	if err != nil {
		return nil, nil, err
	}
	options := append(chromedp.DefaultExecAllocatorOptions[:],
		chromedp.ExecPath(binary), chromedp.UserDataDir(profile), chromedp.NoSandbox, chromedp.DisableGPU,
		chromedp.Flag("disable-quic", true), chromedp.Flag("disable-background-networking", true),
		chromedp.Flag("disable-component-update", true), chromedp.Flag("disable-sync", true),
		chromedp.Flag("disable-dev-shm-usage", true), chromedp.Flag("font-render-hinting", "none"),
		chromedp.Flag("host-resolver-rules", "MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost"),
		chromedp.WSURLReadTimeout(2*time.Minute))
	allocator, endProcess := chromedp.NewExecAllocator(context.Background(), options...)
	ctx, endBrowser := chromedp.NewContext(allocator)
	stop := func() {
		endBrowser()
		endProcess()
		_ = os.RemoveAll(profile) // leftovers are in the folder for temporary files
	}
	if err := chromedp.Run(ctx); err != nil {
		stop()
		return nil, nil, fmt.Errorf("%s: %w", binary, err)
	}
	return ctx, stop, nil
}
