// Package browser drives a real Chromium in tests. It opens pages, clicks and types like a person, and records the
// browser's errors and warnings ([Page.Problems]).
//
// One process of the browser serves a test binary. Every Page has a profile of its own, so pages share no cookies and
// no storage. The browser reaches loopback only. It refuses a request to any other host. Such a request is a problem,
// and so are console errors, uncaught exceptions and violations of the Content-Security-Policy.
//
// The browser is Debian's package chromium. Root installs a missing one; otherwise the test stops and names the command
// to run.
package browser

import (
	"context"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/input"
	cdplog "github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/network"
	"github.com/chromedp/cdproto/performance"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/cdproto/target"
	"github.com/chromedp/chromedp"

	"github.com/lanekeeper/lanekeeper/internal/require"
)

// waitTimeout bounds a step before the test fails: test machines are slow and shared.
const waitTimeout = 3 * time.Minute

// Look is the presentation of a page.
type Look struct {
	Width, Height int64  // of the window in CSS pixels; 1280 by 900 when 0
	Dark          bool   // the reader prefers dark
	Still         bool   // the reader prefers reduced motion
	Forced        bool   // the reader's system has its own few colours
	Print         bool   // the page is printed
	NoScript      bool   // JavaScript is off
	Zone          string // time zone; the machine's when empty
}

// Page is a tab with a profile of its own. Its methods fail the test if a step exceeds its time. Only one goroutine may
// use a Page at a time.
type Page struct {
	tb   testing.TB
	ctx  context.Context // chromedp stores the tab in the context
	look Look            // the current presentation

	mu       sync.Mutex
	problems []string
	expected []string
}

// Open opens an empty page, which closes with the test.
func Open(tb testing.TB, look Look) *Page {
	tb.Helper()
	ctx, cancel := chromedp.NewContext(process(tb), chromedp.WithTargetID(newTab(tb)))
	tb.Cleanup(cancel)
	p := &Page{tb: tb, ctx: ctx}
	chromedp.ListenTarget(ctx, p.recordEvent)
	if err := chromedp.Run(ctx); err != nil {
		tb.Fatalf("open a page: %v", err)
	}
	p.do("prepare the page", network.Enable(), cdplog.Enable())
	p.As(look)
	return p
}

// As changes the presentation of the page without reloading it.
func (p *Page) As(look Look) {
	p.tb.Helper()
	if look.Width == 0 {
		look.Width, look.Height = 1280, 900
	}
	if look == p.look {
		return
	}
	p.look = look
	scheme, motion, colors := "light", "no-preference", "none"
	if look.Dark {
		scheme = "dark"
	}
	if look.Still {
		motion = "reduce"
	}
	if look.Forced {
		colors = "active"
	}
	media := ""
	if look.Print {
		media = "print"
	}
	p.do("change the look", emulation.SetTimezoneOverride(look.Zone),
		emulation.SetDeviceMetricsOverride(look.Width, look.Height, 1, false),
		emulation.SetScriptExecutionDisabled(look.NoScript),
		emulation.SetEmulatedMedia().WithMedia(media).WithFeatures([]*emulation.MediaFeature{
			{Name: "prefers-color-scheme", Value: scheme},
			{Name: "prefers-reduced-motion", Value: motion},
			{Name: "forced-colors", Value: colors},
		}))
}

// newTab opens a window with a profile of its own; a headless browser refuses a tab alone.
func newTab(tb testing.TB) target.ID {
	tb.Helper()
	browser := chromedp.FromContext(process(tb)).Browser
	ctx, cancel := context.WithTimeout(process(tb), waitTimeout)
	defer cancel()
	ctx = cdp.WithExecutor(ctx, browser)
	profile, err := target.CreateBrowserContext().WithDisposeOnDetach(false).Do(ctx)
	if err != nil {
		tb.Fatalf("make a profile: %v", err)
	}
	tb.Cleanup(func() { // after Open has closed the page
		if err := target.DisposeBrowserContext(profile).Do(cdp.WithExecutor(process(tb), browser)); err != nil {
			tb.Logf("forget a profile: %v", err)
		}
	})
	tab, err := target.CreateTarget("about:blank").WithBrowserContextID(profile).WithNewWindow(true).Do(ctx)
	if err != nil {
		tb.Fatalf("open a window: %v", err)
	}
	return tab
}

// do runs steps within the time limit.
func (p *Page) do(what string, steps ...chromedp.Action) {
	p.tb.Helper()
	ctx, cancel := context.WithTimeout(p.ctx, waitTimeout)
	defer cancel()
	if err := chromedp.Run(ctx, steps...); err != nil {
		p.tb.Fatalf("%s: %v\n%s", what, err, p.location())
	}
}

// location describes the current page, its requests and its problems, for a failing test.
func (p *Page) location() string {
	ctx, cancel := context.WithTimeout(p.ctx, 5*time.Second)
	defer cancel()
	var at, text, requests string
	err := chromedp.Run(ctx, chromedp.Location(&at),
		chromedp.Evaluate(`document.body ? document.body.innerText.slice(0, 3000) : ""`, &text),
		chromedp.Evaluate(`performance.getEntriesByType("resource").map((r) =>
			[Math.round(r.startTime), Math.round(r.responseEnd), r.responseStatus, r.name].join(" ")).join("\n")`, &requests))
	if err != nil {
		return fmt.Sprintf("(the page does not answer: %v)", err)
	}
	return at + ":\n" + text + "\nrequests (start, end, status):\n" + requests + "\nproblems:\n" +
		strings.Join(p.Problems(), "\n")
}

// Go opens a URL and waits until it has loaded.
func (p *Page) Go(address string) {
	p.tb.Helper()
	p.do("open "+address, chromedp.Navigate(address))
}

// Reload loads the page again and waits until it has loaded.
func (p *Page) Reload() {
	p.tb.Helper()
	p.do("load the page again", chromedp.Reload())
}

// Click clicks the element of a CSS selector as soon as it is visible.
func (p *Page) Click(selector string) {
	p.tb.Helper()
	at := p.onSeen("click "+selector, selector, `e.scrollIntoViewIfNeeded();
		const r = e.getClientRects()[0];
		return [r.x + r.width / 2, r.y + r.height / 2];`)
	p.do("click "+selector, chromedp.MouseClickXY(at[0], at[1]))
}

// onSeen runs a script with the element e of a CSS selector as soon as the element is visible. The script returns a
// point. The page cannot replace the element while the script runs.
func (p *Page) onSeen(what, selector, script string) (at []float64) {
	p.tb.Helper()
	p.poll(what, fmt.Sprintf(`(e => { if (!e?.checkVisibility({ visibilityProperty: true })) return [];
		%s })(document.querySelector(%q))`, script, selector), &at, func() bool { return len(at) == 2 })
	return at
}

// Hover moves the pointer over the element of a CSS selector.
func (p *Page) Hover(selector string) {
	p.tb.Helper()
	var at [2]float64
	p.Eval(fmt.Sprintf(`(() => { const e = document.querySelector(%q);
		e.scrollIntoView({ block: "center", behavior: "instant" });
		const r = e.getBoundingClientRect();
		return [r.x + r.width / 2, r.y + r.height / 2]; })()`, selector), &at)
	p.do("point at "+selector, chromedp.MouseEvent(input.MouseMoved, at[0], at[1]))
}

// Type types into the element of a CSS selector.
func (p *Page) Type(selector, text string) {
	p.tb.Helper()
	p.onSeen("type into "+selector, selector, `e.focus(); return [0, 0];`)
	p.do("type into "+selector, chromedp.KeyEvent(text))
}

// Press presses keys at the current focus; chromedp/kb has the special keys.
func (p *Page) Press(keys string) {
	p.tb.Helper()
	p.do("press keys", chromedp.KeyEvent(keys))
}

// Text returns the visible text of a CSS selector's first element. A live update may replace the element meanwhile.
func (p *Page) Text(selector string) (text string) {
	p.tb.Helper()
	element := fmt.Sprintf("document.querySelector(%q)", selector)
	p.Until(selector+" is there", element)
	p.Eval(`(e => e.getClientRects().length ? e.innerText : "")(`+element+`)`, &text)
	return text
}

// Eval evaluates JavaScript into out, a target for JSON. It awaits a promise.
func (p *Page) Eval(script string, out any) {
	p.tb.Helper()
	p.do("evaluate "+script[:min(len(script), 80)], chromedp.Evaluate(script, out,
		func(e *runtime.EvaluateParams) *runtime.EvaluateParams { return e.WithAwaitPromise(true) }))
}

// Until waits until a JavaScript expression is true on a page that has loaded. The expression must not be a promise.
// The page may navigate meanwhile.
func (p *Page) Until(what, condition string) {
	p.tb.Helper()
	p.until(what, condition, func() {})
}

// PressUntil presses keys each second until a condition holds, because a page that navigates may ignore a key. The
// condition is like that of Until.
func (p *Page) PressUntil(keys, condition string) {
	p.tb.Helper()
	p.Press(keys)
	n := 0
	p.until("the keys "+keys+" have an effect", condition, func() {
		if n++; n%10 == 0 { // once a second; see poll
			p.Press(keys)
		}
	})
}

// until waits for a condition on a loaded page: a loading page has its address, but only some of its elements. It calls
// between after each check with a false result.
func (p *Page) until(what, condition string, between func()) {
	p.tb.Helper()
	var now struct{ Holds, Loaded bool }
	p.poll("wait until "+what, `({Holds: Boolean(`+condition+`), Loaded: document.readyState === "complete"})`, &now,
		func() bool {
			if !now.Holds {
				between()
			}
			return now.Holds && now.Loaded
		})
}

// poll evaluates a script into now, repeatedly until done.
func (p *Page) poll(what, script string, now any, done func() bool) {
	p.tb.Helper()
	ctx, cancel := context.WithTimeout(p.ctx, waitTimeout)
	defer cancel()
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	var last error
	for {
		err := chromedp.Run(ctx, chromedp.Evaluate(script, now))
		switch {
		case err == nil && done():
			return
		case ctx.Err() == nil:
			last = err // between two pages the script may lack a context
		}
		select {
		case <-ctx.Done():
			p.tb.Fatalf("%s: not within %s (%v)\n%s", what, waitTimeout, last, p.location())
		case <-tick.C:
		}
	}
}

// Shows waits until the page contains a text.
func (p *Page) Shows(text string) {
	p.tb.Helper()
	p.Until("the page shows "+text, fmt.Sprintf("document.body.innerText.includes(%q)", text))
}

// Offline disconnects the page from the network, or connects the page again. While the page is offline, new requests
// fail, but an open stream stays open.
func (p *Page) Offline(off bool) {
	p.tb.Helper()
	everywhere := []*network.Conditions{{DownloadThroughput: -1, UploadThroughput: -1}}
	p.do("change the network", chromedp.ActionFunc(func(ctx context.Context) error {
		if _, err := network.EmulateNetworkConditionsByRule(off, everywhere).Do(ctx); err != nil {
			return err
		}
		return network.OverrideNetworkState(off, 0, -1, -1).Do(ctx)
	}))
}

// Metrics returns the page's seconds of work since the first call, such as TaskDuration, ScriptDuration and
// LayoutDuration. Other load affects these values less than elapsed times.
func (p *Page) Metrics() map[string]float64 {
	p.tb.Helper()
	values := map[string]float64{}
	p.do("measure", chromedp.ActionFunc(func(ctx context.Context) error {
		if err := performance.Enable().WithTimeDomain(performance.EnableTimeDomainThreadTicks).Do(ctx); err != nil {
			return err
		}
		list, err := performance.GetMetrics().Do(ctx)
		for _, m := range list {
			values[m.Name] = m.Value
		}
		return err
	}))
	return values
}

// Screenshot writes the window, or with fullPage the whole page, as PNG.
func (p *Page) Screenshot(path string, fullPage bool) {
	p.tb.Helper()
	var picture []byte
	if fullPage {
		p.do("take a picture", chromedp.FullScreenshot(&picture, 100))
	} else {
		p.do("take a picture", chromedp.CaptureScreenshot(&picture))
	}
	require.NoError(p.tb, os.MkdirAll(filepath.Dir(path), 0o755))
	if err := os.WriteFile(path, picture, 0o644); err != nil { // a picture that every user may read
		p.tb.Fatal(err)
	}
}

// Expect declares that the test causes a problem with these words, which Problems then omits.
func (p *Page) Expect(words string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.expected = append(p.expected, words)
}

// Problems returns the errors and warnings of the browser, without the expected ones.
func (p *Page) Problems() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	var list []string
	for _, problem := range p.problems {
		if !p.isExpected(problem) {
			list = append(list, problem)
		}
	}
	return list
}

func (p *Page) isExpected(problem string) bool {
	for _, words := range p.expected {
		if strings.Contains(problem, words) {
			return true
		}
	}
	return false
}

// recordEvent records the errors and warnings of the browser, and requests to other hosts.
func (p *Page) recordEvent(event any) {
	problem := ""
	switch e := event.(type) {
	case *runtime.EventExceptionThrown:
		problem = "exception: " + e.ExceptionDetails.Error()
	case *runtime.EventConsoleAPICalled:
		if e.Type == runtime.APITypeError || e.Type == runtime.APITypeWarning || e.Type == runtime.APITypeAssert {
			problem = "console: " + argText(e.Args)
		}
	case *cdplog.EventEntryAdded:
		if e.Entry.Level == cdplog.LevelError || e.Entry.Level == cdplog.LevelWarning {
			problem = fmt.Sprintf("%s: %s %s", e.Entry.Source, e.Entry.Text, e.Entry.URL)
		}
	case *network.EventRequestWillBeSent:
		if at, err := url.Parse(e.Request.URL); err == nil && isForeign(at) {
			problem = "request to another host: " + e.Request.URL
		}
	}
	if problem == "" {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.problems = append(p.problems, problem)
}

func isForeign(at *url.URL) bool {
	switch at.Hostname() {
	case "", "127.0.0.1", "localhost", "::1":
		return false
	}
	return true
}

func argText(args []*runtime.RemoteObject) string {
	list := make([]string, 0, len(args))
	for _, a := range args {
		list = append(list, string(a.Value)+a.Description)
	}
	return strings.Join(list, " ")
}
