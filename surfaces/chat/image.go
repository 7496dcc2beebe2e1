package chat

import (
	"cmp"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/lanekeeper/lanekeeper/models"
	"github.com/lanekeeper/lanekeeper/threads"
)

// wirePart is a part of a message's content, in either protocol. image_url is an object in chat completions and a text
// in responses.
type wirePart struct {
	Type    string          `json:"type"`
	Text    string          `json:"text"`
	Refusal string          `json:"refusal"`
	Image   json.RawMessage `json:"image_url"`
	FileID  string          `json:"file_id"`
	Detail  string          `json:"detail"`

	Data     string   `json:"file_data"`
	Filename string   `json:"filename"`
	File     filePart `json:"file"`
}

// image reads an image of a request. The error is what is wrong with it, for the client.
func (p wirePart) image() (threads.Image, error) {
	if p.FileID != "" {
		return threads.Image{}, fmt.Errorf("files are not stored here: send the image's https URL, or the image as a " +
			"data: URL")
	}
	where, ok := text(p.Image)
	if !ok {
		var inner struct {
			URL    string `json:"url"`
			Detail string `json:"detail"`
		}
		if json.Unmarshal(p.Image, &inner) != nil {
			return threads.Image{}, fmt.Errorf("image_url must be a URL, or an object with url")
		}
		where, p.Detail = inner.URL, inner.Detail
	}
	if !slices.Contains([]string{"", "low", "high", "auto"}, p.Detail) {
		return threads.Image{}, fmt.Errorf("detail must be low, high or auto")
	}
	if rest, inside := strings.CutPrefix(where, "data:"); inside {
		return imageInside(rest, p.Detail)
	}
	u, err := url.Parse(where)
	switch {
	case err != nil || u.Scheme != "https" || u.Host == "" || u.User != nil:
		return threads.Image{}, fmt.Errorf("an image is an https URL, or a data: URL with the image in it")
	case len(where) > threads.MostImageURL || strings.ContainsFunc(where, unprintable):
		return threads.Image{}, fmt.Errorf("an image's URL has at most %d printable characters", threads.MostImageURL)
	}
	return threads.Image{URL: "https" + where[len("https"):], Detail: p.Detail}, nil
}

func unprintable(r rune) bool { return r <= ' ' || r == 0x7f }

// imageInside reads what follows data: in a URL. What the bytes are counts, not what they are called.
func imageInside(rest, detail string) (threads.Image, error) {
	kind, encoded, ok := strings.Cut(rest, ";base64,")
	if !ok {
		return threads.Image{}, fmt.Errorf("a data: URL has the form data:image/png;base64,…")
	}
	if base64.StdEncoding.DecodedLen(len(encoded)) > threads.MostImageSize+2 {
		return threads.Image{}, fmt.Errorf("an image has at most %d bytes", threads.MostImageSize)
	}
	data, err := base64.StdEncoding.DecodeString(encoded)
	if err != nil {
		return threads.Image{}, fmt.Errorf("the data of a data: URL must be base64")
	}
	found := http.DetectContentType(data)
	switch {
	case len(data) > threads.MostImageSize:
		return threads.Image{}, fmt.Errorf("an image has at most %d bytes", threads.MostImageSize)
	case !slices.Contains(imageTypes(), found):
		return threads.Image{}, fmt.Errorf("an image is png, jpeg, gif or webp, and this is none")
	case kind != found && (kind != "image/jpg" || found != "image/jpeg"):
		return threads.Image{}, fmt.Errorf("the data: URL says %s, and its data is %s", clip(kind, 40), found)
	}
	return threads.Image{MediaType: found, Data: data, Detail: detail}, nil
}

// imageTypes are the media types of images that models take.
func imageTypes() []string { return []string{"image/png", "image/jpeg", "image/gif", "image/webp"} }

// takesImages reports an agent whose model takes images.
func (c *Chat) takesImages(a Ask) bool {
	return c.Loop.Model.TakesImages(cmp.Or(a.agent.Model, c.Loop.Model.Model()))
}

// seen refuses images that the agent's model does not take.
func (c *Chat) seen(a Ask) error {
	if len(slices.Concat(a.Images...)) == 0 && !slices.ContainsFunc(a.Earlier,
		func(l Line) bool { return len(l.Images) > 0 }) {
		return nil
	}
	if c.takesImages(a) {
		return nil
	}
	return bad("messages", "image_not_supported", "The model of %s takes no images: send the message without them.",
		a.Model)
}

// imagesOf are the images of messages as a model gets them, by the message's id.
func (c *Chat) imagesOf(ctx context.Context, messages []threads.Message) (map[string][]models.Part, error) {
	found, err := threads.Images(ctx, c.Pool, messages)
	parts := make(map[string][]models.Part, len(found))
	for id, list := range found {
		for _, image := range list {
			parts[id] = append(parts[id], image.Part())
		}
	}
	return parts, err
}
